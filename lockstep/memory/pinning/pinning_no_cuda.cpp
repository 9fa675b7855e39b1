// SPDX-License-Identifier: Apache-2.0
#include "lockstep/memory/pinning/pinning.h"

namespace lockstep::memory::detail::cuda {

bool has_device() { return false; }

std::string register_pages(std::span<std::byte>) { return "this is a build without CUDA"; }

void unregister_pages(std::span<std::byte>) {}

}  // namespace lockstep::memory::detail::cuda
