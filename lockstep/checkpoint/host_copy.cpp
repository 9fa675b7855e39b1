// SPDX-License-Identifier: Apache-2.0
#include "lockstep/checkpoint/host_copy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <unordered_set>

#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::checkpoint::detail {
namespace {

constexpr int64_t kBlock = int64_t{1} << 26;
constexpr int64_t kAlignment = 64;  // of where a slice begins: a multiple of every element's size

// Calls with every block's number, and the part of it that the bytes are in.
template <class Function>
void for_each_part(layout::Range bytes, const Function& function) {
  while (!bytes.empty()) {
    const int64_t offset = bytes.begin % kBlock, size = std::min(bytes.size(), kBlock - offset);
    function(static_cast<size_t>(bytes.begin / kBlock), offset, size);
    bytes.begin += size;
  }
}

// Not from torch's allocator, unless it must be pinned: memory.max_per_device is for training.
at::Tensor new_block(int64_t size, bool pinned) {
  if (pinned) return at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true));
  auto* memory = new std::byte[static_cast<size_t>(size)];
  return at::from_blob(
      memory, {size}, [](void* block) { delete[] static_cast<std::byte*>(block); }, at::kByte);
}

}  // namespace

void HostCopy::find_places(const std::vector<NamedSlice>& slices) {
  places_.clear();
  int64_t total = 0;
  bool pinned = false;
  for (const NamedSlice& slice : slices) {
    const auto size = static_cast<int64_t>(slice.tensor.nbytes());
    places_.push_back({total, total + size});
    total += (size + kAlignment - 1) / kAlignment * kAlignment;
    pinned = pinned || !slice.tensor.device().is_cpu();
  }
  std::vector<at::Tensor> before;
  before.swap(blocks_);
  for (int64_t begin = 0; begin < total; begin += kBlock) {
    const int64_t size = std::min(kBlock, total - begin);
    const size_t index = blocks_.size();
    const bool fits = index < before.size() && before[index].numel() >= size;
    blocks_.push_back(fits ? before[index] : new_block(size, pinned));
  }
}

void HostCopy::reserve(const std::vector<NamedSlice>& slices) {
  find_places(slices);
  for (const at::Tensor& block : blocks_) block.zero_();
}

void HostCopy::take(const std::vector<NamedSlice>& slices) {
  const at::NoGradGuard no_grad;
  find_places(slices);
  std::unordered_set<c10::Device> devices;
  for (size_t i = 0; i < slices.size(); ++i) {
    // In the tensor's own type: torch copies bytes at less than half the speed.
    if (!slices[i].tensor.device().is_cpu()) devices.insert(slices[i].tensor.device());
    const at::Tensor source = slices[i].tensor.detach().contiguous().view({-1});
    const auto width = static_cast<int64_t>(source.element_size());
    int64_t first = 0;
    for_each_part(places_[i], [&](size_t block, int64_t offset, int64_t size) {
      blocks_[block]
          .narrow(0, offset, size)
          .view(source.scalar_type())
          .copy_(source.narrow(0, first, size / width), /*non_blocking=*/true);
      first += size / width;
    });
  }
  for (const c10::Device& device : devices) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
}

void HostCopy::bytes(size_t slice, const Sink& sink) const {
  for_each_part(places_[slice], [&](size_t block, int64_t offset, int64_t size) {
    sink(memory::bytes_of(blocks_[block].narrow(0, offset, size)));
  });
}

}  // namespace lockstep::checkpoint::detail
