// half and half2, for the emulator.
#pragma once
#include "halves.h"

HALF_TYPES(__half, __half2, __half_raw, __half2_raw, emulator::HalfBits)
HALF_CONVERSIONS(__half, __half2, __half_raw, half, half2, emulator::HalfBits)
typedef __half half, nv_half;
typedef __half2 half2, nv_half2;
typedef __half2 __nv_half2;
typedef __half __nv_half;

#define CUDART_INF_FP16 __ushort_as_half((unsigned short)0x7C00U)
#define CUDART_NAN_FP16 __ushort_as_half((unsigned short)0x7FFFU)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half((unsigned short)0x0001U)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half((unsigned short)0x7BFFU)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half((unsigned short)0x8000U)
#define CUDART_ZERO_FP16 __ushort_as_half((unsigned short)0x0000U)
#define CUDART_ONE_FP16 __ushort_as_half((unsigned short)0x3C00U)
