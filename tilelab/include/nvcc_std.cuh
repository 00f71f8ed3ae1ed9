// The functions and types of std that nvcc's files use in kernels. NVRTC has those of CCCL.
#pragma once
#include "nvcc.cuh"

#ifndef EMULATED_ARCH
#if __has_include(<cuda/std/algorithm>)
#include <cuda/std/algorithm>
#else  // older CCCL
#include <cuda/std/__algorithm/clamp.h>
#include <cuda/std/__algorithm/max.h>
#include <cuda/std/__algorithm/min.h>
#endif
#include <cuda/std/array>
#include <cuda/std/cmath>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#include <cuda/std/type_traits>
#include <cuda/std/utility>
namespace std {
using namespace cuda::std;
}
#endif
