// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include "lockstep/memory/pinning/pinning.h"

namespace lockstep::memory::detail::cuda {
namespace {

// Errors stay with the thread until they are asked for, and torch would take them for its own.
cudaError_t cleared(cudaError_t result) {
  if (result != cudaSuccess) cudaGetLastError();
  return result;
}

}  // namespace

bool has_device() {
  int count = 0;
  return cleared(cudaGetDeviceCount(&count)) == cudaSuccess && count > 0;
}

std::string register_pages(std::span<std::byte> pages) {
  // Portable: for every device, and every thread that uses one.
  const cudaError_t result =
      cleared(cudaHostRegister(pages.data(), pages.size(), cudaHostRegisterPortable));
  return result == cudaSuccess ? "" : cudaGetErrorString(result);
}

void unregister_pages(std::span<std::byte> pages) { cleared(cudaHostUnregister(pages.data())); }

}  // namespace lockstep::memory::detail::cuda
