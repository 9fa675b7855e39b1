// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/nccl/communicator.h"

#include <chrono>
#include <condition_variable>
#include <utility>
#include <vector>

#include "lockstep/core/clock.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"

namespace lockstep::comm::nccl {
namespace {

// The others leave the group at about the same time, unless something went wrong.
constexpr milliseconds kFarewell{2000};

// Until `condition` holds or the time is over: NCCL has nothing to wait on.
bool wait_for(milliseconds time, const std::function<bool()>& condition) {
  std::mutex mutex;
  std::condition_variable never;
  std::unique_lock lock(mutex);
  for (const Deadline deadline(time); !condition();) {
    if (deadline.passed()) return false;
    never.wait_for(lock, milliseconds{1});
  }
  return true;
}

}  // namespace

Communicator::Communicator(const Engine& engine, int device) : engine_(engine), device_(device) {
  const DeviceGuard guard(*engine_.runtime, device_);
  seat_.stream = engine_.runtime->make_stream();
}

Communicator::~Communicator() {
  try {
    const DeviceGuard guard(*engine_.runtime, device_);
    shutdown();
    if (owned_ && !wait_for_good_byes()) abort();
  } catch (const std::exception& error) {
    log::debug(format("[nccl] a communicator was not destroyed cleanly: {}", error.what()));
    abort();
  }
  engine_.runtime->free_stream(seat_.stream);
}

std::string Communicator::words(Result result) const {
  const char* const last =
      engine_.api->get_last_error != nullptr ? engine_.api->get_last_error(nullptr) : nullptr;
  std::string text = format("NCCL: {}", engine_.api->get_error_string(result));
  if (last != nullptr && *last != '\0') text += format(" ({})", last);
  for (char& letter : text) {
    if (letter == '\n') letter = ' ';
  }
  return text;
}

void Communicator::begin(const UniqueId& id, int rank, int size) {
  const std::lock_guard lock(mutex_);
  const DeviceGuard guard(*engine_.runtime, device_);
  seat_.rank = rank;
  seat_.size = size;
  Config config;
  const Result result = engine_.api->comm_init_rank_config(&seat_.comm, size, id, rank, &config);
  if (result != Result::success && result != Result::in_progress) throw CommError(words(result));
}

void Communicator::adopt(ncclComm* comm, int rank, int size) {
  const std::lock_guard lock(mutex_);
  seat_.comm = comm;
  seat_.rank = rank;
  seat_.size = size;
  owned_ = false;
}

bool Communicator::is_begun() const {
  const std::lock_guard lock(mutex_);
  return seat_.comm != nullptr || aborted_;
}

bool Communicator::is_aborted() const {
  const std::lock_guard lock(mutex_);
  return aborted_;
}

bool Communicator::call(const std::function<Result(const Seat&)>& call) {
  const std::lock_guard lock(mutex_);
  if (aborted_) return true;
  const DeviceGuard guard(*engine_.runtime, device_);
  // An adopted communicator that blocks stays in here while it connects, and abort() waits:
  // ncclCommAbort frees what the call uses, so NCCL has no way to end it.
  const Result result = call(seat_);
  if (result == Result::in_progress) return false;
  if (result != Result::success) throw CommError(words(result));
  return true;
}

bool Communicator::is_settled() {
  const std::lock_guard lock(mutex_);
  if (aborted_ || seat_.comm == nullptr) return true;
  Result state = Result::success;
  const Result result = engine_.api->comm_get_async_error(seat_.comm, &state);
  if (result != Result::success) throw CommError(words(result));
  if (state == Result::in_progress) return false;
  if (state != Result::success) throw CommError(words(state));
  return true;
}

void Communicator::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (aborted_) return;
  aborted_ = true;
  if (seat_.comm == nullptr) return;
  try {
    const DeviceGuard guard(*engine_.runtime, device_);
    engine_.api->comm_abort(std::exchange(seat_.comm, nullptr));
  } catch (const std::exception& error) {
    log::debug(format("[nccl] a communicator was not aborted: {}", error.what()));
  }
}

void Communicator::shutdown() noexcept {
  bool failed = false;
  {
    const std::lock_guard lock(mutex_);
    // Tensors in its memory may live a little longer.
    if (!owned_ || leaving_ || seat_.comm == nullptr || !memory_.empty()) return;
    leaving_ = true;
    const Result result = engine_.api->comm_finalize(seat_.comm);
    failed = result != Result::success && result != Result::in_progress;
  }
  if (failed) abort();
}

bool Communicator::wait_for_good_byes() {
  if (!wait_for(kFarewell, [this] { return is_settled(); })) return false;
  const std::lock_guard lock(mutex_);
  if (owned_ && seat_.comm != nullptr)
    engine_.api->comm_destroy(std::exchange(seat_.comm, nullptr));
  return true;
}

std::shared_ptr<std::byte> Communicator::allocate(const std::shared_ptr<Communicator>& communicator,
                                                  size_t bytes) {
  const Api& api = *communicator->engine_.api;
  if (api.mem_alloc == nullptr || api.mem_free == nullptr || api.comm_register == nullptr ||
      api.comm_deregister == nullptr) {
    return nullptr;
  }
  const DeviceGuard guard(*communicator->engine_.runtime, communicator->device_);
  void* data = nullptr;
  // Torch's cache may have what is free: then it comes from there.
  if (api.mem_alloc(&data, bytes) != Result::success) return nullptr;
  const std::lock_guard lock(communicator->mutex_);
  communicator->memory_[data] = {.bytes = bytes};
  return {static_cast<std::byte*>(data),
          [communicator](std::byte* memory) { communicator->free(memory); }};
}

// Local: no other rank takes part.
void Communicator::register_memory() {
  std::vector<void*> unknown;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [data, registration] : memory_) {
      if (registration.handle == nullptr) unknown.push_back(data);
    }
  }
  for (void* const data : unknown) {
    call([&](const Seat& seat) {
      const auto found = memory_.find(data);
      if (found == memory_.end()) return Result::success;
      return engine_.api->comm_register(seat.comm, data, found->second.bytes,
                                        &found->second.handle);
    });
  }
}

void Communicator::free(std::byte* data) noexcept {
  try {
    const DeviceGuard guard(*engine_.runtime, device_);
    // Operations hold the memory that they use; what this thread's stream does with it does not,
    // and nothing orders its end after that. The whole device may be waiting for other ranks.
    const Runtime& runtime = *engine_.runtime;
    CUevent_st* const used = runtime.make_event(false);
    runtime.record(used, runtime.current_stream(device_));
    runtime.synchronize(used);
    runtime.free_event(used);
    MemoryRegistration registration;
    {
      const std::lock_guard lock(mutex_);
      registration = memory_.extract(data).mapped();
    }
    if (registration.handle != nullptr)
      call([&](const Seat& seat) {
        return engine_.api->comm_deregister(seat.comm, registration.handle);
      });
  } catch (const std::exception& error) {
    log::debug(format("[nccl] memory was not unregistered: {}", error.what()));
  }
  engine_.api->mem_free(data);
}

}  // namespace lockstep::comm::nccl
