// The same functions; cuda_pipeline.h of the toolkit has them, too.
#pragma once
#include "cuda_pipeline_primitives.h"
