// The functions and types of std that nvcc's files use in kernels. NVRTC has those of CCCL.
#pragma once
#include "nvcc.cuh"

#ifndef EMULATED_ARCH
#include <cuda/std/algorithm>
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
