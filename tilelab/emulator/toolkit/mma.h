// nvcuda::wmma is unknown to the emulator. Many files include the header and use mma.sync instead.
#pragma once
namespace nvcuda {
namespace wmma {}
}  // namespace nvcuda
