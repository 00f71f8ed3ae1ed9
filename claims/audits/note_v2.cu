// Version 2 of the field note on resampling, with the three indexing errors of the published one mended: lane 0 alone
// compares and divides, shuffles hand its answers to the warp, and the grid is persistent.
#include "ptx.cuh"

extern "C" __global__ void note_v2(const float* features, const float* source_times, const float* target_times,
                                   float* out, int sources, int targets, int chunks, int items) {
    __shared__ float times[TIMES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {  // a persistent grid
        const int batch = item / chunks, first = item % chunks * CHUNK;
        for (int i = threadIdx.x; i < sources; i += 256) times[i] = source_times[batch * sources + i];
        __syncthreads();

        for (int i = first + warp; i < min(first + CHUNK, targets); i += 8) {
            const int row = batch * targets + i;
            const float target = target_times[row];
            int low = 0, high = sources - 2;
            while (low < high) {
                const int middle = (low + high + 1) / 2;
                int decision = 0;
                if (lane == 0) decision = times[middle] <= target;  // only lane 0 reads
                decision = __shfl_sync(0xffffffff, decision, 0);    // and all lanes get its answer
                if (decision) low = middle;
                else high = middle - 1;
            }
            float w = 0;
            if (lane == 0) {  // one division per warp
                const float begin = times[low], end = times[low + 1];
                w = target >= end ? 1 : target <= begin ? 0 : (target - begin) / (end - begin);
            }
            w = __shfl_sync(0xffffffff, w, 0);

            const float* left = features + (u64(batch) * sources + low) * DEPTH;
            for (int feature = lane; feature < DEPTH; feature += 32)
                out[u64(row) * DEPTH + feature] = (1 - w) * left[feature] + w * left[DEPTH + feature];
        }
        __syncthreads();  // before the next item's times overwrite these
    }
}