// SPDX-License-Identifier: Apache-2.0
// Whole pages locked in memory. Private: not installed.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace lockstep::memory::detail {

// Locks pages that are not touched yet, as far as the system's limit is concerned: no page of them
// leaves memory once it is there. Throws Error with the numbers.
void lock_pages(std::span<std::byte> pages, std::string_view what);

// For pages that are there; pinning_cuda.cpp, or pinning_no_cuda.cpp in builds without CUDA.
namespace cuda {

bool has_device();
// What CUDA says where it refuses, else nothing.
std::string register_pages(std::span<std::byte> pages);
void unregister_pages(std::span<std::byte> pages);

}  // namespace cuda
}  // namespace lockstep::memory::detail
