/* A libcuda.so.1 for Triton's launcher on a machine without a GPU: it writes down what is launched.

A kernel's handle is the address of the sizes of its parameters, with a zero behind the last. */

#include "cuda.h"
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT unsigned char written[1 << 16];
EXPORT size_t length;

static void put(const void *from, size_t size) {
  memcpy(written + length, from, size);
  length += size;
}

static void put_number(unsigned long long x) { put(&x, sizeof x); }

/* Eight numbers: kernel, grid, threads, shared memory, stream, attributes by a bit each; then the
parameters, each behind its size, and a zero. */
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction kernel, void **parameters,
                                 void **extra) {
  unsigned long long attributes = 0;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    attributes |= 1ull << config->attrs[i].id;
  put_number((unsigned long long)kernel);
  put_number(config->gridDimX);
  put_number(config->gridDimY);
  put_number(config->gridDimZ);
  put_number(config->blockDimX);
  put_number(config->sharedMemBytes);
  put_number((unsigned long long)config->hStream);
  put_number(attributes);
  for (const int *size = (const int *)kernel; *size; ++size, ++parameters) {
    put_number(*size);
    put(*parameters, *size);
  }
  put_number(0);
  return CUDA_SUCCESS;
}

/* A descriptor holds what it was made of: its address, the rank, sizes, strides, and the box. */
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                                       void *address, const cuuint64_t *sizes,
                                       const cuuint64_t *strides, const cuuint32_t *box,
                                       const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
                                       CUtensorMapFloatOOBfill fill) {
  cuuint64_t *to = (cuuint64_t *)map;
  memset(map, 0, sizeof *map);
  to[0] = (cuuint64_t)address;
  to[1] = rank;
  for (unsigned i = 0; i < rank; ++i) {
    to[2 + i] = sizes[i];
    to[7 + i] = i + 1 < rank ? strides[i] : 0;
    to[12] = 1000 * to[12] + box[i];
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void *to, CUpointer_attribute what, CUdeviceptr address) {
  *(CUdeviceptr *)to = address;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)1;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error";
  return CUDA_SUCCESS;
}

/* What Triton's modules are linked with besides, and do not call here. */
#define UNUSED(name)                                                                                \
  EXPORT CUresult unused_##name(void) __asm__(#name);                                               \
  CUresult unused_##name(void) { return CUDA_ERROR_NOT_SUPPORTED; }

UNUSED(cuCtxGetLimit)
UNUSED(cuCtxSetCurrent)
UNUSED(cuCtxSetLimit)
UNUSED(cuDeviceGet)
UNUSED(cuDeviceGetAttribute)
UNUSED(cuDevicePrimaryCtxRetain)
UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoadData)
