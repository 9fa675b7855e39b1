// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/tiers/offload_tiers.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <initializer_list>

#include "lockstep/core/error.h"

namespace lockstep::parallel::detail {
namespace {

memory::HostKind kind_of(const layout::OffloadOptions& options, c10::Device device) {
  return options.advanced.pin.value_or(device.is_cuda()) ? memory::HostKind::pinned
                                                         : memory::HostKind::pageable;
}

size_t bytes_of(int64_t count, at::ScalarType dtype) {
  return static_cast<size_t>(count) * c10::elementSize(dtype);
}

at::Tensor tensor_at(std::shared_ptr<void> memory, int64_t count, at::ScalarType dtype,
                     c10::Device device) {
  void* const data = memory.get();
  const std::array<int64_t, 1> sizes{count};
  return at::from_blob(
      data, sizes, [memory = std::move(memory)](void*) {},
      at::TensorOptions().dtype(dtype).device(device));
}

void wait_for(std::initializer_list<std::shared_ptr<memory::Queue>> queues) noexcept {
  for (const auto& queue : queues) {
    try {
      queue->record().wait();
    } catch (const std::exception&) {
      continue;
    }
  }
}

}  // namespace

OffloadTiers::OffloadTiers(layout::OffloadOptions given, c10::Device given_device, int rank)
    : options(std::move(given)),
      device(given_device),
      device_budget("offload.device_limit", static_cast<size_t>(options.device_limit)),
      // It is for what comes and goes.
      param_budget("offload.param_budget",
                   options.params ? static_cast<size_t>(options.param_budget) : 0),
      host_budget("offload.host_budget", static_cast<size_t>(options.host_budget)),
      device_memory(device, device_budget),
      host_memory(host_budget, kind_of(options, device)),
      fetch(memory::make_queue(device,
                               {.rank = rank, .name = "parameters to device", .paced = true})),
      send(memory::make_queue(device, {.rank = rank, .name = "gradients from device"})),
      decode(
          memory::make_queue(device, {.rank = rank, .name = "decode parameters", .urgent = true})),
      in(memory::make_queue(
          device, {.rank = rank, .name = "state to device", .paced = true, .behind = fetch})),
      home(memory::make_queue(device,
                              {.rank = rank, .name = "parameters from device", .paced = true})),
      out(memory::make_queue(
          device, {.rank = rank, .name = "state from device", .paced = true, .behind = home})),
      work(memory::make_queue(device, {.rank = rank, .name = "update", .urgent = true})),
      driver(memory::make_host_queue({.rank = rank, .name = "update driver"})) {
  if (!options.disk.empty())
    disk.emplace(options.disk, memory::DiskStoreOptions{.max_waiting = 2, .rank = rank});
}

at::Tensor OffloadTiers::on_device(int64_t count, at::ScalarType dtype, std::string_view what,
                                   memory::Stay stay) const {
  const at::TensorOptions as = at::TensorOptions().dtype(dtype).device(device);
  if (count == 0) return at::empty({0}, as);
  return tensor_at(device_memory.take(bytes_of(count, dtype), what, stay), count, dtype, device);
}

at::Tensor OffloadTiers::parameters_on_device(int64_t count, at::ScalarType dtype,
                                              std::string_view what, memory::Stay stay) const {
  if (count == 0) return on_device(0, dtype, what);
  struct Held {
    memory::Budget::Share share;
    std::shared_ptr<void> memory;
  };
  auto held = std::make_shared<Held>();
  const size_t bytes = bytes_of(count, dtype);
  held->share = param_budget.take(device_memory.rounded(bytes), what);
  held->memory = device_memory.take(bytes, what, stay);
  void* const data = held->memory.get();
  return tensor_at(std::shared_ptr<void>(std::move(held), data), count, dtype, device);
}

at::Tensor OffloadTiers::on_host(int64_t count, at::ScalarType dtype, std::string_view what) const {
  if (count == 0) return at::empty({0}, dtype);
  return tensor_at(host_memory.take(bytes_of(count, dtype), what), count, dtype, at::kCPU);
}

void OffloadTiers::to_device(memory::Queue& queue, void* to, const void* from, size_t bytes,
                             std::string_view what) {
  queue.copy(to, from, bytes, what);
  traffic.to_device += static_cast<int64_t>(bytes);
}

void OffloadTiers::to_host(memory::Queue& queue, void* to, const void* from, size_t bytes,
                           std::string_view what) {
  queue.copy(to, from, bytes, what);
  traffic.to_host += static_cast<int64_t>(bytes);
}

at::Tensor OffloadTiers::stage(int64_t count, at::ScalarType dtype) {
  constexpr size_t kStages = 2;
  const auto bytes = static_cast<int64_t>(bytes_of(count, dtype));
  if (stages_.size() < kStages) {
    stages_.push_back({on_host(bytes, at::kByte, "gradients on their way")});
  } else {
    std::rotate(stages_.begin(), stages_.begin() + 1, stages_.end());  // the oldest
    Stage& oldest = stages_.back();
    oldest.free.wait();
    if (oldest.memory.numel() < bytes)
      oldest.memory = on_host(bytes, at::kByte, "gradients on their way");
  }
  return stages_.back().memory.narrow(0, 0, bytes).view(dtype);
}

void OffloadTiers::return_stage(const at::Tensor& stage, memory::Event event) {
  for (Stage& each : stages_) {
    if (each.memory.data_ptr() == stage.data_ptr()) each.free = event;
  }
}

void OffloadTiers::take_gradients(size_t flat) const {
  const auto optimizer = updater.lock();
  if (!optimizer) {
    throw Error(
        "[offload] clip_mode none updates parameters in backward, but there is no "
        "OffloadedAdamW or OffloadedSGD for the model");
  }
  optimizer->take_gradients(flat);
}

void OffloadTiers::announce_foreign_writes() const {
  if (const auto optimizer = updater.lock()) optimizer->before_foreign_writes();
}

void OffloadTiers::wait() const noexcept {
  wait_for({driver});  // which fills the others
  wait_for_updates();
  wait_for({fetch, send, decode});
}

void OffloadTiers::wait_for_updates() const noexcept { wait_for({in, work, home, out}); }

void OffloadTiers::free_retired() {
  wait();
  std::erase_if(retired_, [](const auto& each) { return each.second.passed(); });
}

void OffloadTiers::make_room(size_t bytes) {
  if (!device_memory.fits(device_memory.rounded(bytes))) free_retired();
}

void OffloadTiers::retire(std::shared_ptr<void> memory, memory::Event event) {
  std::erase_if(retired_, [](const auto& each) { return each.second.passed(); });
  retired_.emplace_back(std::move(memory), std::move(event));
}

}  // namespace lockstep::parallel::detail
