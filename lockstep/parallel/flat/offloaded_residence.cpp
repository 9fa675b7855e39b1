// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/flat/offloaded_residence.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <chrono>
#include <utility>

#include "lockstep/optim/kernels/packed_update.h"

namespace lockstep::parallel::detail {

using layout::Tier;

at::Tensor OffloadedResidence::line_memory(at::ScalarType dtype, c10::Device device) {
  if (device != plan_.device) return GatheredResidence::line_memory(dtype, device);
  if (is_collective()) {
    // A gather that is complete may still have its line for a moment, in the backend's thread.
    constexpr std::chrono::milliseconds kMoment{2000};
    tiers().param_budget.wait_until_fits(line_bytes(), kMoment);
    tiers().device_budget.wait_until_fits(line_bytes(), kMoment);
  }
  tiers().make_room(line_bytes());
  return tiers().parameters_on_device(parameter_.layout().size, dtype, plan_.name,
                                      memory::Stay::short_time);
}

bool OffloadedResidence::has_room() const {
  // All ranks take part in such a gather, so all must decide alike: by what they agreed on, and by
  // what they have gathered, which is the same on all of them.
  if (is_collective()) return tiers().collective_lines + line_bytes() <= tiers().line_room;
  return tiers().param_budget.fits(line_bytes()) && tiers().device_memory.fits(line_bytes());
}

size_t OffloadedResidence::line_bytes() const {
  return tiers().device_memory.rounded(static_cast<size_t>(parameter_.layout().size) *
                                       c10::elementSize(plan_.compute_dtype));
}

void OffloadedResidence::drop_line() {
  if (std::exchange(counted_, false)) tiers().collective_lines -= line_bytes();
  GatheredResidence::drop_line();
}

void OffloadedResidence::begin(bool beside_computation) {
  if (is_collective() && !std::exchange(counted_, true)) tiers().collective_lines += line_bytes();
  GatheredResidence::begin(beside_computation);
  if (plan_.shard.size() > 1 && plan_.offload->params == Tier::host)
    tiers().traffic.to_device += static_cast<int64_t>(line_.nbytes());
}

void HostResidence::begin(bool /*beside_computation*/) {
  line_ = line_memory(plan_.compute_dtype, plan_.device);
  memory::Queue& fetch = *tiers().fetch;
  // The line's memory was another's, and may still be read by what is queued.
  fetch.wait(memory::computed(plan_.device));
  fetch.wait(shard_.updating());
  queue_copy(fetch);
  fetched_ = fetch.record();
  if (!tiers().options.advanced.overlap) fetched_.wait();
}

void HostResidence::queue_copy(memory::Queue& fetch) {
  tiers().to_device(fetch, line_.data_ptr(), shard_.values().data_ptr(), line_.nbytes(),
                    plan_.name);
}

void HostResidence::wait() { memory::compute_after(std::exchange(fetched_, {}), plan_.device); }

bool EncodedResidence::decodes_there() const {
  return plan_.device.is_cuda() && !shard_.encoded()->is_lossless();
}

bool EncodedResidence::has_room() const {
  const size_t codes = decodes_there() ? shard_.encoded()->block().code_bytes : 0;
  const size_t line =
      static_cast<size_t>(parameter_.layout().size) * c10::elementSize(plan_.compute_dtype);
  return OffloadedResidence::has_room() &&
         (codes == 0 || tiers().device_memory.fits(tiers().device_memory.rounded(line) + codes));
}

void EncodedResidence::queue_copy(memory::Queue& fetch) {
  const EncodedShard& shard = *shard_.encoded();
  auto* const line = static_cast<std::byte*>(line_.data_ptr());
  const at::ScalarType dtype = plan_.compute_dtype;
  if (decodes_there()) {
    codes_ =
        tiers().on_device(shard.codes().numel(), at::kByte, plan_.name, memory::Stay::short_time);
    tiers().to_device(fetch, codes_.data_ptr(), shard.codes().data_ptr(), codes_.nbytes(),
                      plan_.name);
  } else if (plan_.device.is_cuda()) {
    shard_.wait_updated();
    const at::Tensor plain = at::empty(line_.sizes(), line_.options().device(at::kCPU));
    shard.decode_all(dtype, static_cast<std::byte*>(plain.data_ptr()));
    tiers().to_device(fetch, line, plain.data_ptr(), plain.nbytes(), plan_.name);
    tiers().retire(std::make_shared<at::Tensor>(plain), fetch.record());
  } else {
    fetch.run([&shard, dtype, line] { shard.decode_all(dtype, line); }, plan_.name);
    tiers().traffic.to_device += static_cast<int64_t>(shard.bytes_to_read());
  }
}

void EncodedResidence::wait() {
  if (!codes_.defined()) return HostResidence::wait();
  memory::Queue& decode = *tiers().decode;
  decode.wait(std::exchange(fetched_, {}));
  const EncodedShard& shard = *shard_.encoded();
  auto* const codes = static_cast<std::byte*>(codes_.data_ptr());
  const DType dtype = plan_.compute_dtype == at::kFloat  ? DType::float32
                      : plan_.compute_dtype == at::kHalf ? DType::float16
                                                         : DType::bfloat16;
  const c10::DeviceGuard guard(plan_.device);
  for (const EncodedTensor& tensor : shard.block().tensors) {
    codec::CodedArray array = shard.array(tensor);
    array.codes = codes + tensor.codes;
    if (array.scales != nullptr) array.scales = reinterpret_cast<float*>(codes + tensor.scales);
    auto* const line = static_cast<std::byte*>(line_.data_ptr()) +
                       static_cast<size_t>(tensor.range.begin) * line_.element_size();
    optim::cuda::launch_decode(array, tensor.range.size(), dtype, line, decode.stream());
  }
  memory::compute_after(decode.record(), plan_.device);
  codes_.reset();  // what takes its memory next comes after the computation, and so after this
}

}  // namespace lockstep::parallel::detail
