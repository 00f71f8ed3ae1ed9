// libcuda.so.1 without a GPU, for tests/pretended_gpu.py: it answers what cuda.core, cuda.bindings and Triton ask of one
// GPU, and notes what cuLaunchKernelEx is given. A tensor map holds the arguments of its encoding.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;
#define ANSWER(name, ...) int name(__VA_ARGS__)
#define YES { return 0; }

static int context;
static char* notes;  // where the next launch is noted
static const size_t* sizes;  // of its parameters, up to a 0
void note_launches_in(char* where, const size_t* parameter_sizes) { notes = where; sizes = parameter_sizes; }

ANSWER(cuInit, unsigned flags) YES
ANSWER(cuDriverGetVersion, int* version) { *version = 13000; return 0; }
ANSWER(cuDeviceGet, int* device, int ordinal) { *device = ordinal; return 0; }
ANSWER(cuDeviceGetCount, int* count) { *count = 1; return 0; }
ANSWER(cuDeviceGetAttribute, int* value, int attribute, int device) {
    // Threads per block, shared memory, warp size, SMs, registers, capability 9.0, shared memory per SM and with opt-in.
    static const int known[][2] = {{1, 1024}, {8, 49152}, {10, 32}, {16, 132}, {12, 65536}, {75, 9}, {76, 0},
                                   {81, 233472}, {97, 232448}};
    *value = 1;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return 0;
}
ANSWER(cuDevicePrimaryCtxRetain, void** made, int device) { *made = &context; return 0; }
ANSWER(cuDevicePrimaryCtxRelease_v2, int device) YES
ANSWER(cuCtxGetCurrent, void** current) { *current = &context; return 0; }
ANSWER(cuCtxSetCurrent, void* current) YES
ANSWER(cuCtxPushCurrent_v2, void* current) YES
ANSWER(cuCtxPopCurrent_v2, void** current) { *current = &context; return 0; }
ANSWER(cuCtxGetDevice, int* device) { *device = 0; return 0; }
ANSWER(cuCtxGetLimit, size_t* value, int limit) { *value = 0; return 0; }
ANSWER(cuCtxSetLimit, int limit, size_t value) YES
ANSWER(cuGetErrorString, int error, const char** text) { *text = "an error"; return 0; }
ANSWER(cuGetErrorName, int error, const char** text) { *text = "ERROR"; return 0; }
ANSWER(cuModuleLoadData, void** module, const void* image) { *module = malloc(8); return 0; }
ANSWER(cuModuleGetFunction, void** function, void* module, const char* name) { *function = malloc(8); return 0; }
ANSWER(cuLibraryLoadData, void** library, const void* image, void* a, void* b, unsigned c, void* d, void* e, unsigned f) {
    *library = malloc(8);
    return 0;
}
ANSWER(cuLibraryUnload, void* library) YES
ANSWER(cuLibraryGetKernel, void** kernel, void* library, const char* name) { *kernel = malloc(8); return 0; }
ANSWER(cuKernelGetAttribute, int* value, int attribute, void* kernel, int device) { *value = 0; return 0; }
ANSWER(cuKernelSetAttribute, int attribute, int value, void* kernel, int device) YES
ANSWER(cuFuncGetAttribute, int* value, int attribute, void* function) { *value = attribute ? 0 : 1024; return 0; }
ANSWER(cuFuncSetAttribute, void* function, int attribute, int value) YES
ANSWER(cuFuncSetCacheConfig, void* function, int config) YES
ANSWER(cuOccupancyMaxActiveClusters, int* count, void* function, void* config) { *count = 1; return 0; }
ANSWER(cuPointerGetAttribute, u64* value, int attribute, u64 pointer) { *value = pointer; return 0; }
ANSWER(cuTensorMapEncodeIm2col, void) { return 1; }

typedef struct { u64 address; int type, rank, interleave, swizzle, promotion, fill; uint32_t shape[5], box[5]; u64 strides[4]; } Map;
_Static_assert(sizeof(Map) <= 128, "a tensor map has 128 bytes");

ANSWER(cuTensorMapEncodeTiled, void* map, int type, unsigned rank, void* address, const u64* shape, const u64* strides,
       const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
    if (!shape || !strides || !box || !steps) return 1;  // as CUDA's driver does, also for one dimension
    Map made = {(u64)address, type, rank, interleave, swizzle, promotion, fill};
    for (unsigned i = 0; i < rank; i++) {
        made.shape[i] = shape[i];
        made.box[i] = box[i];
        // The stride of an extent of 1 is never taken.
        if (i + 1 < rank) made.strides[i] = shape[i + 1] > 1 ? strides[i] : 0;
    }
    memset(map, 0, 128);
    memcpy(map, &made, sizeof made);
    return 0;
}
ANSWER(cuTensorMapReplaceAddress, Map* map, void* address) { map->address = (u64)address; return 0; }

typedef struct { int id, unused; unsigned value[16]; } Attribute;
typedef struct { unsigned grid[3], block[3], smem_bytes; void* stream; Attribute* attributes; unsigned count; } Config;

ANSWER(cuLaunchKernelEx, const Config* config, void* function, void** parameters, void** extra) {
    if (!notes) return 0;
    const unsigned *g = config->grid, *b = config->block;
    notes += sprintf(notes, "grid %u %u %u block %u %u %u smem %u stream %p", g[0], g[1], g[2], b[0], b[1], b[2],
                     config->smem_bytes, config->stream);
    for (unsigned i = 0; i < config->count; i++)
        notes += sprintf(notes, " attribute %d: %u", config->attributes[i].id, config->attributes[i].value[0]);
    for (int i = 0; sizes[i]; i++) {
        notes += sprintf(notes, "\n%d: ", i);
        for (size_t j = 0; j < sizes[i]; j++) notes += sprintf(notes, "%02x", ((unsigned char*)parameters[i])[j]);
    }
    notes += sprintf(notes, "\n");
    return 0;
}
ANSWER(cuGetProcAddress_v2, const char* name, void** function, int version, u64 flags, int* status) {
    char second[256];
    void* self = dlopen("libcuda.so.1", RTLD_LAZY);
    snprintf(second, sizeof second, "%s_v2", name);
    *function = dlsym(self, second);
    if (!*function) *function = dlsym(self, name);
    if (status) *status = !*function;
    return *function ? 0 : 500;
}
