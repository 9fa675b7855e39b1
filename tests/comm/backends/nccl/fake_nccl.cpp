// SPDX-License-Identifier: Apache-2.0
#include "tests/comm/backends/nccl/fake_nccl.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "lockstep/core/format.h"
#include "lockstep/fabric/reduce.h"
#include "tests/comm/backends/nccl/fake_cuda.h"

using lockstep::comm::fake::Call;
using lockstep::comm::nccl::Result;

namespace {

using Bytes = std::vector<std::byte>;

// All that ranks of one communicator share.
struct Room {
  int size = 0;
  std::set<int> joined, finalized;
  std::map<size_t, std::map<int, Bytes>> posted;              // by number of the collective
  std::map<size_t, int> read;                                 // by so many ranks
  std::map<std::pair<int, int>, std::deque<Bytes>> messages;  // from, to
  std::map<std::pair<int, int>, size_t> sent, taken;
};

// One for the process, as NCCL is.
struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Call> calls;
  std::map<int, Room> rooms;  // by id
  std::map<int, Result> async_errors;
  std::string failing, holding;
  int held = 0;
  int next_id = 0;
};

State& state() {
  static State instance;
  return instance;
}

}  // namespace

struct ncclComm {
  struct Shared {
    int id, rank, size;
    size_t collectives = 0;
    bool aborted = false, finalizing = false;
  };
  std::shared_ptr<Shared> shared;
};

namespace lockstep::comm::fake {
namespace {

using nccl::DataType;
using nccl::RedOp;
using Comm = std::shared_ptr<ncclComm::Shared>;

// What a call does on its stream. In a group, the first step of all comes before the second of any.
struct Steps {
  std::function<void()> first = {}, second = {}, third = {};
};

void take(const std::vector<Steps>& calls) {
  for (const auto step : {&Steps::first, &Steps::second, &Steps::third}) {
    for (const Steps& steps : calls) {
      if (steps.*step) (steps.*step)();
    }
  }
}

// What a thread has begun between group_start and group_end.
struct Grouped {
  int depth = 0;
  std::map<CUstream_st*, std::vector<Steps>> work;
};
thread_local Grouped grouped;

Result note(Call call) {
  std::unique_lock lock(state().mutex);
  call.grouped = grouped.depth > 0;
  const bool fails = call.function == state().failing;
  const std::string function = call.function;
  state().calls.push_back(std::move(call));
  if (function == state().holding) {
    ++state().held;
    state().changed.notify_all();
    state().changed.wait(lock, [&] { return function != state().holding; });
    --state().held;
  }
  return fails ? Result::internal_error : Result::success;
}

template <class Condition>
void wait_until(const Comm& comm, Condition condition, std::unique_lock<std::mutex>& lock) {
  state().changed.wait(lock, [&] { return comm->aborted || condition(); });
}

DType dtype_of(DataType type) {
  switch (type) {
    case DataType::int8:
      return DType::int8;
    case DataType::int32:
      return DType::int32;
    case DataType::int64:
      return DType::int64;
    case DataType::float16:
      return DType::float16;
    case DataType::float32:
      return DType::float32;
    case DataType::float64:
      return DType::float64;
    case DataType::bfloat16:
      return DType::bfloat16;
    default:
      return DType::uint8;
  }
}

fabric::ReduceOp reduction_of(RedOp op) {
  switch (op) {
    case RedOp::product:
      return fabric::ReduceOp::product;
    case RedOp::max:
      return fabric::ReduceOp::max;
    case RedOp::min:
      return fabric::ReduceOp::min;
    case RedOp::avg:
      return fabric::ReduceOp::avg;
    default:
      return fabric::ReduceOp::sum;
  }
}

void begin(CUstream_st* stream, Steps steps) {
  if (grouped.depth > 0) {
    grouped.work[stream].push_back(std::move(steps));
    return;
  }
  stream->add([steps = std::move(steps)] { take({steps}); });
}

// Every rank posts what it has; when all have, `finish` gets that.
Result collective(ncclComm* comm, CUstream_st* stream, const void* data, size_t bytes,
                  std::function<void(const std::map<int, Bytes>&)> finish) {
  const Comm shared = comm->shared;
  const size_t number = shared->collectives++;
  begin(stream, {[=] {
                   Bytes mine(bytes);
                   if (bytes > 0) std::memcpy(mine.data(), data, bytes);
                   const std::lock_guard lock(state().mutex);
                   state().rooms[shared->id].posted[number][shared->rank] = std::move(mine);
                   state().changed.notify_all();
                 },
                 [=] {
                   std::map<int, Bytes> all;
                   {
                     std::unique_lock lock(state().mutex);
                     Room& room = state().rooms[shared->id];
                     auto& posted = room.posted[number];
                     wait_until(
                         shared, [&] { return posted.size() == static_cast<size_t>(shared->size); },
                         lock);
                     if (shared->aborted) return;
                     all = posted;
                     if (++room.read[number] == shared->size) room.posted.erase(number);
                   }
                   finish(all);
                 },
                 {}});
  return Result::success;
}

void reduce_into(void* target, const std::map<int, Bytes>& parts, size_t offset, size_t count,
                 DataType type, RedOp op) {
  std::vector<const std::byte*> inputs;
  for (const auto& [rank, bytes] : parts) inputs.push_back(bytes.data() + offset);
  auto* const output = static_cast<std::byte*>(target);
  fabric::reduce(dtype_of(type), reduction_of(op), {&output, 1}, inputs, count);
}

Call call_of(const char* function, ncclComm* comm, CUstream_st* stream, size_t count, DataType type,
             int op, int peer) {
  return {.function = function,
          .rank = comm->shared->rank,
          .size = comm->shared->size,
          .count = count,
          .type = type,
          .op = op,
          .peer = peer,
          .comm = comm,
          .stream = stream};
}

// ---- NCCL ----

Result get_version(int* version) {
  *version = 22809;
  return Result::success;
}
Result get_unique_id(nccl::UniqueId* id) {
  *id = {};
  const std::lock_guard lock(state().mutex);
  const int number = ++state().next_id;
  std::memcpy(id->internal, &number, sizeof number);
  state().calls.push_back({.function = "get_unique_id"});
  return Result::success;
}
const char* get_error_string(Result result) {
  return result == Result::remote_error ? "remote process exited" : "internal error";
}
Result comm_init(ncclComm** comm, int size, nccl::UniqueId id, int rank, nccl::Config* config) {
  int number = 0;
  std::memcpy(&number, id.internal, sizeof number);
  *comm = new ncclComm{std::make_shared<ncclComm::Shared>(number, rank, size)};
  note({.function = config->blocking != 0 ? "blocking init" : "init",
        .rank = rank,
        .size = size,
        .peer = number,
        .comm = *comm});
  const std::lock_guard lock(state().mutex);
  state().rooms[number].size = size;
  state().rooms[number].joined.insert(rank);
  return Result::in_progress;
}
Result comm_finalize(ncclComm* comm) {
  note({.function = "finalize", .rank = comm->shared->rank, .comm = comm});
  const std::lock_guard lock(state().mutex);
  comm->shared->finalizing = true;
  state().rooms[comm->shared->id].finalized.insert(comm->shared->rank);
  return Result::in_progress;
}
Result comm_destroy(ncclComm* comm) {
  note({.function = "destroy", .rank = comm->shared->rank, .comm = comm});
  delete comm;
  return Result::success;
}
Result comm_abort(ncclComm* comm) {
  note({.function = "abort", .rank = comm->shared->rank, .comm = comm});
  {
    const std::lock_guard lock(state().mutex);
    comm->shared->aborted = true;
    // What nobody has taken yet does not go out any more.
    for (auto& [number, posted] : state().rooms[comm->shared->id].posted) {
      if (posted.size() < static_cast<size_t>(comm->shared->size)) posted.erase(comm->shared->rank);
    }
    state().changed.notify_all();
  }
  delete comm;
  return Result::success;
}
Result comm_get_async_error(ncclComm* comm, Result* error) {
  const std::lock_guard lock(state().mutex);
  const Room& room = state().rooms[comm->shared->id];
  const auto all = static_cast<size_t>(room.size);
  const auto found = state().async_errors.find(comm->shared->rank);
  const bool waits =
      room.joined.size() < all || (comm->shared->finalizing && room.finalized.size() < all);
  *error = found != state().async_errors.end() ? found->second
           : waits                             ? Result::in_progress
                                               : Result::success;
  return Result::success;
}
Result comm_count(const ncclComm* comm, int* size) {
  *size = comm->shared->size;
  return Result::success;
}
Result comm_user_rank(const ncclComm* comm, int* rank) {
  *rank = comm->shared->rank;
  return Result::success;
}
Result comm_cu_device(const ncclComm*, int* device) {
  *device = 0;
  return Result::success;
}
Result group_start() {
  ++grouped.depth;
  return Result::success;
}
Result group_end() {
  if (--grouped.depth > 0) return Result::success;
  for (auto& [stream, work] : std::exchange(grouped.work, {})) {
    stream->add([work = std::move(work)] { take(work); });
  }
  return Result::success;
}
Result all_reduce(const void* send, void* recv, size_t count, DataType type, RedOp op,
                  ncclComm* comm, CUstream_st* stream) {
  const Result noted =
      note(call_of("all_reduce", comm, stream, count, type, static_cast<int>(op), -1));
  if (noted != Result::success) return noted;
  return collective(comm, stream, send, count * size_of(dtype_of(type)),
                    [=](const auto& parts) { reduce_into(recv, parts, 0, count, type, op); });
}
Result reduce(const void* send, void* recv, size_t count, DataType type, RedOp op, int root,
              ncclComm* comm, CUstream_st* stream) {
  note(call_of("reduce", comm, stream, count, type, static_cast<int>(op), root));
  return collective(comm, stream, send, count * size_of(dtype_of(type)),
                    [=, mine = comm->shared->rank](const auto& parts) {
                      if (mine == root) reduce_into(recv, parts, 0, count, type, op);
                    });
}
Result broadcast(const void* send, void* recv, size_t count, DataType type, int root,
                 ncclComm* comm, CUstream_st* stream) {
  note(call_of("broadcast", comm, stream, count, type, -1, root));
  const size_t bytes = count * size_of(dtype_of(type));
  return collective(comm, stream, send, comm->shared->rank == root ? bytes : 0,
                    [=](const auto& parts) { std::memcpy(recv, parts.at(root).data(), bytes); });
}
Result all_gather(const void* send, void* recv, size_t count, DataType type, ncclComm* comm,
                  CUstream_st* stream) {
  note(call_of("all_gather", comm, stream, count, type, -1, -1));
  const size_t bytes = count * size_of(dtype_of(type));
  return collective(comm, stream, send, bytes, [=](const auto& parts) {
    auto* target = static_cast<std::byte*>(recv);
    for (const auto& [rank, data] : parts) {
      std::memcpy(target, data.data(), bytes);
      target += bytes;
    }
  });
}
Result reduce_scatter(const void* send, void* recv, size_t count, DataType type, RedOp op,
                      ncclComm* comm, CUstream_st* stream) {
  note(call_of("reduce_scatter", comm, stream, count, type, static_cast<int>(op), -1));
  const size_t bytes = count * size_of(dtype_of(type));
  const auto rank = static_cast<size_t>(comm->shared->rank),
             size = static_cast<size_t>(comm->shared->size);
  return collective(comm, stream, send, bytes * size, [=](const auto& parts) {
    reduce_into(recv, parts, rank * bytes, count, type, op);
  });
}
Result send(const void* data, size_t count, DataType type, int peer, ncclComm* comm,
            CUstream_st* stream) {
  note(call_of("send", comm, stream, count, type, -1, peer));
  const Comm shared = comm->shared;
  const std::pair route(shared->rank, peer);
  const auto number = std::make_shared<size_t>();
  begin(stream, {[=] {
                   const auto* const bytes = static_cast<const std::byte*>(data);
                   const std::lock_guard lock(state().mutex);
                   Room& room = state().rooms[shared->id];
                   room.messages[route].emplace_back(bytes,
                                                     bytes + count * size_of(dtype_of(type)));
                   *number = ++room.sent[route];
                   state().changed.notify_all();
                 },
                 {},
                 [=] {
                   std::unique_lock lock(state().mutex);
                   Room& room = state().rooms[shared->id];
                   wait_until(
                       shared, [&] { return room.taken[route] >= *number; }, lock);
                 }});
  return Result::success;
}
Result recv(void* data, size_t count, DataType type, int peer, ncclComm* comm,
            CUstream_st* stream) {
  note(call_of("recv", comm, stream, count, type, -1, peer));
  const Comm shared = comm->shared;
  const std::pair route(peer, shared->rank);
  begin(stream, {{},
                 [=] {
                   std::unique_lock lock(state().mutex);
                   Room& room = state().rooms[shared->id];
                   wait_until(
                       shared, [&] { return !room.messages[route].empty(); }, lock);
                   if (shared->aborted) return;
                   const Bytes message = std::move(room.messages[route].front());
                   room.messages[route].pop_front();
                   ++room.taken[route];
                   state().changed.notify_all();
                   std::memcpy(data, message.data(),
                               std::min(message.size(), count * size_of(dtype_of(type))));
                 },
                 {}});
  return Result::success;
}
Result mem_alloc(void** data, size_t size) {
  note({.function = "mem_alloc", .count = size});
  *data = ::operator new(size);
  return Result::success;
}
Result mem_free(void* data) {
  note({.function = "mem_free"});
  ::operator delete(data);
  return Result::success;
}
Result comm_register(const ncclComm* comm, void* data, size_t size, void** handle) {
  note({.function = "register", .rank = comm->shared->rank, .count = size, .comm = comm});
  *handle = data;
  return Result::success;
}
Result comm_deregister(const ncclComm* comm, void*) {
  note({.function = "deregister", .rank = comm->shared->rank, .comm = comm});
  return Result::success;
}

nccl::Api make_api(bool is_old) {
  nccl::Api api{.get_version = get_version,
                .get_unique_id = get_unique_id,
                .get_error_string = get_error_string,
                .comm_init_rank_config = comm_init,
                .comm_finalize = comm_finalize,
                .comm_destroy = comm_destroy,
                .comm_abort = comm_abort,
                .comm_get_async_error = comm_get_async_error,
                .comm_count = comm_count,
                .comm_user_rank = comm_user_rank,
                .comm_cu_device = comm_cu_device,
                .group_start = group_start,
                .group_end = group_end,
                .all_reduce = all_reduce,
                .reduce = reduce,
                .broadcast = broadcast,
                .all_gather = all_gather,
                .reduce_scatter = reduce_scatter,
                .send = send,
                .recv = recv};
  if (is_old) return api;
  api.mem_alloc = mem_alloc;
  api.mem_free = mem_free;
  api.comm_register = comm_register;
  api.comm_deregister = comm_deregister;
  return api;
}

}  // namespace

std::string Call::text() const {
  std::string text = format("{}({} x {}", function, count, static_cast<int>(type));
  if (op >= 0) text += format(", op {}", op);
  if (peer >= 0)
    text += format(", {} {}", function == "send" || function == "recv" ? "peer" : "root", peer);
  return text + (grouped ? "), grouped" : ")");
}

nccl::Engine engine() {
  static const nccl::Api api = make_api(false);
  return {&api, &kRuntime};
}

nccl::Engine old_engine() {
  static const nccl::Api api = make_api(true);
  return {&api, &kRuntime};
}

std::vector<Call> take_calls() {
  const std::lock_guard lock(state().mutex);
  return std::exchange(state().calls, {});
}

std::vector<std::string> texts(const std::vector<Call>& calls, int rank) {
  std::vector<std::string> texts;
  for (const Call& call : calls) {
    if (call.rank == rank && call.stream != nullptr) texts.push_back(call.text());
  }
  return texts;
}

size_t count(const std::vector<Call>& calls, const std::string& function) {
  return static_cast<size_t>(std::count_if(
      calls.begin(), calls.end(), [&](const Call& call) { return call.function == function; }));
}

void set_async_error(int rank, Result error) {
  const std::lock_guard lock(state().mutex);
  state().async_errors.erase(rank);
  if (error != Result::success) state().async_errors[rank] = error;
}

void fail_calls_of(const std::string& function) {
  const std::lock_guard lock(state().mutex);
  state().failing = function;
}

void hold_calls_of(const std::string& function) {
  const std::lock_guard lock(state().mutex);
  state().holding = function;
  state().changed.notify_all();
}

void wait_for_held_call() {
  std::unique_lock lock(state().mutex);
  state().changed.wait(lock, [] { return state().held > 0; });
}

}  // namespace lockstep::comm::fake
