#include "lockstep/checkpoint/host_copy.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <unordered_set>

#include "lockstep/comm/tensor.h"

namespace lockstep::checkpoint::detail {
namespace {

constexpr int64_t kBlock = int64_t{1} << 26;

// Calls with every block's number, and the part of it that bytes [begin, end) are in.
template <class Function>
void for_each_part(int64_t begin, int64_t end, const Function& function) {
  while (begin < end) {
    const int64_t offset = begin % kBlock, size = std::min(end - begin, kBlock - offset);
    function(static_cast<size_t>(begin / kBlock), offset, size);
    begin += size;
  }
}

// Of bytes. From a device, it may end later.
void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  if (!from.device().is_cpu()) {
    to.copy_(from, /*non_blocking=*/true);
    return;
  }
  // Torch's own copy of bytes takes more than twice as long.
  constexpr int64_t kPiece = int64_t{1} << 20;
  const auto* source = static_cast<const std::byte*>(from.data_ptr());
  auto* target = static_cast<std::byte*>(to.data_ptr());
  at::parallel_for(0, from.numel(), kPiece, [&](int64_t begin, int64_t end) {
    std::memcpy(target + begin, source + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace

void HostCopy::take(const std::vector<NamedSlice>& slices) {
  const at::NoGradGuard no_grad;
  begins_ = {0};
  std::unordered_set<c10::Device> devices;
  for (const NamedSlice& slice : slices) {
    begins_.push_back(begins_.back() + static_cast<int64_t>(slice.tensor.nbytes()));
    if (!slice.tensor.device().is_cpu()) devices.insert(slice.tensor.device());
  }
  std::vector<at::Tensor> before;
  before.swap(blocks_);
  const auto options = at::TensorOptions(at::kByte).pinned_memory(!devices.empty());
  for (int64_t begin = 0; begin < begins_.back(); begin += kBlock) {
    const int64_t size = std::min(kBlock, begins_.back() - begin);
    const size_t index = blocks_.size();
    const bool fits = index < before.size() && before[index].numel() >= size;
    blocks_.push_back(fits ? before[index] : at::empty({size}, options));
  }
  for (size_t i = 0; i < slices.size(); ++i) {
    if (begins_[i] == begins_[i + 1]) continue;
    const at::Tensor source = slices[i].tensor.detach().contiguous().view({-1}).view(at::kByte);
    for_each_part(begins_[i], begins_[i + 1], [&](size_t block, int64_t offset, int64_t size) {
      const int64_t from = static_cast<int64_t>(block) * kBlock + offset - begins_[i];
      copy_bytes(source.narrow(0, from, size), blocks_[block].narrow(0, offset, size));
    });
  }
  for (const c10::Device& device : devices) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
}

void HostCopy::bytes(size_t slice, const Sink& sink) const {
  for_each_part(begins_[slice], begins_[slice + 1],
                [&](size_t block, int64_t offset, int64_t size) {
                  sink(comm::detail::bytes_of(blocks_[block].narrow(0, offset, size)));
                });
}

}  // namespace lockstep::checkpoint::detail
