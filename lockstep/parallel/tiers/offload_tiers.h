// SPDX-License-Identifier: Apache-2.0
// The memory that an offloaded model has on the device, on the host and on disk, and the queues
// that move bytes between them. Private: not installed.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/layout/offload.h"
#include "lockstep/layout/offload_plan.h"
#include "lockstep/memory/budget.h"
#include "lockstep/memory/device_memory.h"
#include "lockstep/memory/disk_store.h"
#include "lockstep/memory/host_memory.h"
#include "lockstep/memory/queue.h"
#include "lockstep/parallel/tiers/activation_peak.h"

namespace lockstep::parallel::detail {

// Bytes that have crossed between tiers. Counted where copies are queued.
struct TierTraffic {
  std::atomic<int64_t> to_device = 0, to_host = 0;
  std::atomic<int64_t> from_disk = 0, to_disk = 0;
};

// Optimizer state outside the device: bytes as they are kept, and without codecs.
struct KeptState {
  std::atomic<int64_t> bytes = 0, plain = 0;
  // Bytes without LZ4 that are on the host and were planned for the disk.
  std::atomic<int64_t> moved_to_host = 0;
};

// The optimizer of an offloaded model.
class OffloadedUpdater {
 public:
  virtual ~OffloadedUpdater() = default;
  // The gradients of a whole step have come, where parameters are updated in backward.
  virtual void take_gradients(size_t flat) = 0;
  // Others may write parameters from here to the next step.
  virtual void before_foreign_writes() = 0;
};

class OffloadTiers {
 public:
  // `options` without zeros.
  OffloadTiers(layout::OffloadOptions options, c10::Device device, int rank);
  ~OffloadTiers() { wait(); }  // what is on its way uses memory that goes now

  const layout::OffloadOptions options;
  const c10::Device device;
  const memory::Budget device_budget, param_budget, host_budget;
  const memory::DeviceMemory device_memory;
  const memory::HostMemory host_memory;
  // For the model: parameters to the device, gradients from it. What they wait for may be an
  // update, so updates have queues of their own: state to the device and from it, parameters from
  // it (the next forward waits for them, not for the state with them), for what is computed
  // there concurrently with the model, and a thread that drives them.
  // `decode` is for kernels that decode parameters.
  const std::shared_ptr<memory::Queue> fetch, send, decode, in, home, out, work, driver;
  std::optional<memory::DiskStore> disk;
  TierTraffic traffic;
  KeptState kept;
  std::weak_ptr<OffloadedUpdater> updater;
  // Hands a flat's gradients to it; Error where there is none.
  void take_gradients(size_t flat) const;
  // Tells it, where there is one, that others may write parameters from here to the next step.
  void announce_foreign_writes() const;

  // Chosen when the model was arranged.
  layout::UpdateSite site = layout::UpdateSite::cpu;
  size_t ring_bytes = 0;  // on the device, for state on its way
  // Where gathers are collectives: bytes of gathered parameters that every rank has room for at
  // once, the same on all ranks, and those that are gathered or arriving.
  size_t line_room = 0, collective_lines = 0;
  // The last decision about places, and what it may be made again for: activations, the most of
  // them in any step so far as ranks agreed on it, and how often places were decided again.
  layout::OffloadPlan plan;
  ActivationPeak activations{device};
  int64_t activation_peak = 0;
  int64_t decisions = 0;
  // Of host_budget, for state that LZ4 packs.
  memory::Budget state_room = {"offload.host_budget", 0};
  std::atomic<bool> exceeded = false;  // host_budget, by what LZ4 compresses; said once
  // Of gradients that LZ4 is compressing, in the order of their beginning.
  std::deque<memory::Event> packing;
  // Norms of the gradients that updates in backward took, since grad_norm() was last asked for.
  std::vector<at::Tensor> consumed;

  bool updates_in_backward() const { return options.advanced.clip_mode == layout::ClipMode::none; }

  // 1-d tensors. On the device within its budget, and that for parameters.
  at::Tensor on_device(int64_t count, at::ScalarType dtype, std::string_view what,
                       memory::Stay stay = memory::Stay::long_time) const;
  at::Tensor parameters_on_device(int64_t count, at::ScalarType dtype, std::string_view what,
                                  memory::Stay stay) const;
  at::Tensor on_host(int64_t count, at::ScalarType dtype, std::string_view what) const;

  // Copies, counted; the queue's own order holds.
  void to_device(memory::Queue& queue, void* to, const void* from, size_t bytes,
                 std::string_view what);
  void to_host(memory::Queue& queue, void* to, const void* from, size_t bytes,
               std::string_view what);
  void copy_in(void* to, const void* from, size_t bytes, std::string_view what) {
    to_device(*in, to, from, bytes, what);
  }
  void copy_out(void* to, const void* from, size_t bytes, std::string_view what) {
    to_host(*out, to, from, bytes, what);
  }

  // Host memory for what is on its way, used again after the event that it is returned with. By the
  // thread that computes.
  at::Tensor stage(int64_t count, at::ScalarType dtype);
  void return_stage(const at::Tensor& stage, memory::Event event);

  // Until nothing is in flight any more; errors were told to those that waited for the work.
  void wait() const noexcept;
  // The same for the queues of updates alone. By their driver, or while it has nothing to do.
  void wait_for_updates() const noexcept;

  // Keeps memory until the event has passed. By the thread that computes.
  void retire(std::shared_ptr<void> memory, memory::Event event);
  // Waits, and lets all of that go: before much is taken at once.
  void free_retired();
  // The same, if so many bytes do not fit on the device: updates may still have gradients there.
  void make_room(size_t bytes);

 private:
  struct Stage {
    at::Tensor memory;  // bytes
    memory::Event free = {};
  };
  std::vector<Stage> stages_;
  std::vector<std::pair<std::shared_ptr<void>, memory::Event>> retired_;
};

}  // namespace lockstep::parallel::detail
