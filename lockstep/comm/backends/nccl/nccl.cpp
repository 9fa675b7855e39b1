// SPDX-License-Identifier: Apache-2.0
// Collectives of a group run on one communicator and stream. Messages must depend on nothing else,
// so each direction between two ranks has a communicator of its own, made when it is first used: a
// send on the device waits for its recv, and whatever was queued behind it would wait too.
#include "lockstep/comm/backends/nccl/nccl.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "lockstep/comm/backends/nccl/nccl_stream.h"
#include "lockstep/comm/control/call_consistency.h"
#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/fabric/agreement.h"

namespace lockstep::comm::nccl {
namespace {

using fabric::Operation;
using fabric::OpKind;

// Smaller ones would each take a page of 2 MB, and gain nothing.
constexpr size_t kLeastAllocation = size_t{1} << 20;

bool is_reduction(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::reduce_scatter;
}

std::span<std::byte> bytes_of(UniqueId& id) {
  return std::as_writable_bytes(std::span(id.internal));
}

std::string to_text(const UniqueId& id) {
  std::string text;
  for (const char byte : id.internal) text += format("{:02x}", static_cast<unsigned char>(byte));
  return text;
}

UniqueId from_text(const std::string& text) {
  UniqueId id{};
  check(text.size() == 2 * sizeof(id.internal), "an NCCL id has 128 bytes");
  for (size_t i = 0; i < sizeof(id.internal); ++i)
    id.internal[i] = static_cast<char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

struct Nothing final : detail::Pending {
  void wait() override {}
  bool done() const override { return true; }
};

class NcclGroup final : public detail::GroupImpl, public std::enable_shared_from_this<NcclGroup> {
 public:
  NcclGroup(const Engine& engine, detail::Membership membership, const std::string& name,
            std::shared_ptr<detail::GroupImpl> companion)
      : GroupImpl(std::move(membership), name),
        engine_(engine),
        companion_(std::move(companion)),
        watchdog_(this->membership(), "nccl"),
        trace_(this->membership(), "nccl"),
        rank_(this->membership().rank),
        size_(this->membership().size()) {
    if (!this->membership().world->check || size_ == 1) return;
    detail::Membership same = this->membership();
    same.name += "/headers";
    announcements_ = detail::make_announcement_group(same);
    if (!announcements_) headers_ = detail::make_plain_group(same, same.world->host_backend);
  }

  ~NcclGroup() override {
    // A stream that fails looks at all others: none may go before all are still.
    std::vector<NcclStream*> streams;
    if (collectives_) streams.push_back(collectives_.get());
    for (auto& [key, stream] : messages_) streams.push_back(stream.get());
    for (NcclStream* stream : streams) stream->finish();
    for (NcclStream* stream : streams) stream->communicator().shutdown();
  }

  void adopt(ncclComm* comm, int device) {
    make_collectives(device).communicator().adopt(comm, rank_, size_);
    is_open_ = true;
  }

  std::shared_ptr<detail::Pending> submit(Operation operation,
                                          std::shared_ptr<const void> memory) override;
  int device_for(const at::Tensor& tensor) const override {
    return engine_.runtime->device_of(tensor);
  }

  std::shared_ptr<std::byte> allocate(size_t bytes) override { return companion_->allocate(bytes); }
  std::shared_ptr<std::byte> allocate_on(int device, size_t bytes) override {
    if (bytes < kLeastAllocation) return nullptr;
    NcclStream& stream = make_collectives(device);
    if (stream.communicator().device() != device) return nullptr;
    auto memory = Communicator::allocate(stream.shared_communicator(), bytes);
    if (memory) {
      if (is_open_) stream.communicator().register_memory();
      const std::lock_guard lock(mutex_);
      std::erase_if(allocated_, [](const auto& each) { return each.second.first.expired(); });
      allocated_[memory.get()] = {memory, bytes};
    }
    return memory;
  }
  bool reaches(const void* data, size_t bytes) const override {
    {
      const std::lock_guard lock(mutex_);
      const auto after = allocated_.upper_bound(static_cast<const std::byte*>(data));
      if (after != allocated_.begin()) {
        const auto& [begin, block] = *std::prev(after);
        const auto offset = static_cast<size_t>(static_cast<const std::byte*>(data) - begin);
        if (!block.first.expired() && offset + bytes <= block.second) return true;
      }
    }
    return companion_->reaches(data, bytes);
  }
  fabric::Location locate(const void* data, size_t bytes) const override {
    return companion_->locate(data, bytes);
  }
  std::shared_ptr<const std::byte> reach(int rank,
                                         const fabric::Location& location) const override {
    return companion_->reach(rank, location);
  }
  std::shared_ptr<detail::Pending> announce(Operation operation) override {
    return companion_->announce(std::move(operation));
  }
  bool sums_in_rank_tree() const override { return companion_->sums_in_rank_tree(); }
  bool abort(const std::string& why) override {
    break_group(std::make_exception_ptr(
        CommError(format("rank {} of group '{}': {}", rank_, membership().name, why))));
    return companion_->abort(why);
  }

 private:
  class NcclPending;
  class HostPending;
  using MessageKey = std::pair<OpKind, int>;  // direction, peer

  NcclStream::Options stream_options(std::function<void(const Ticket&)> prepare) {
    return {.watchdog = watchdog_,
            .trace = trace_,
            .prepare = std::move(prepare),
            .fail = [this](std::exception_ptr error) { break_group(std::move(error)); }};
  }
  UniqueId make_id() const {
    UniqueId id{};
    const Result result = engine_.api->get_unique_id(&id);
    if (result != Result::success)
      throw CommError(format("[nccl] rank {} of group '{}': no id for a communicator: {}", rank_,
                             membership().name, engine_.api->get_error_string(result)));
    return id;
  }
  NcclStream& make_collectives(int device);
  NcclStream& open_collectives(int device, const Operation& operation, uint64_t sequence);
  NcclStream& message_stream(const Operation& operation);
  void open_message_stream(NcclStream& stream, const Ticket& ticket);
  void compare_headers(const Ticket& ticket);
  void check_device(const Operation& operation) const;
  // The companion knows that a member has broken the group, but not with what.
  template <class Body>
  auto rethrow_translated(Body body) const {
    try {
      return body();
    } catch (const CommError&) {
      watchdog_.throw_if_failed();
      watchdog_.throw_if_told();
      throw;
    }
  }
  // Tells everybody, and ends what runs. Returns what is thrown from now on.
  std::exception_ptr break_group(std::exception_ptr error) noexcept;

  const Engine engine_;
  const std::shared_ptr<detail::GroupImpl> companion_;
  // Where messages are compared: by announcing them, or else by sending what they are.
  std::shared_ptr<detail::GroupImpl> announcements_, headers_;
  detail::OperationWatchdog watchdog_;
  detail::OperationTrace trace_;
  const int rank_, size_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::pair<std::weak_ptr<std::byte>, size_t>> allocated_;
  std::unique_ptr<NcclStream> collectives_;
  std::map<MessageKey, std::unique_ptr<NcclStream>> messages_;
  std::atomic<bool> is_open_{false};  // collectives_ is connected
};

class NcclGroup::NcclPending final : public detail::Pending {
 public:
  NcclPending(std::shared_ptr<NcclGroup> group, NcclStream& stream, std::shared_ptr<Ticket> ticket)
      : group_(std::move(group)), stream_(stream), ticket_(std::move(ticket)) {}

  void wait() override { stream_.wait(*ticket_); }
  bool done() const override { return stream_.done(*ticket_); }

 private:
  std::shared_ptr<NcclGroup> group_;
  NcclStream& stream_;
  std::shared_ptr<Ticket> ticket_;
};

class NcclGroup::HostPending final : public detail::Pending {
 public:
  HostPending(std::shared_ptr<NcclGroup> group, std::shared_ptr<detail::Pending> pending)
      : group_(std::move(group)), pending_(std::move(pending)) {}
  void wait() override {
    group_->rethrow_translated([this] { pending_->wait(); });
  }
  bool done() const override { return pending_->done(); }

 private:
  std::shared_ptr<NcclGroup> group_;
  std::shared_ptr<detail::Pending> pending_;
};

NcclStream& NcclGroup::make_collectives(int device) {
  const std::lock_guard lock(mutex_);
  if (!collectives_)
    collectives_ = std::make_unique<NcclStream>(std::make_shared<Communicator>(engine_, device),
                                                stream_options(nullptr));
  return *collectives_;
}

// Collective where it is not open yet: all ranks have come, and will call NCCL, when the companion
// has carried the id to them.
NcclStream& NcclGroup::open_collectives(int device, const Operation& operation, uint64_t sequence) {
  NcclStream& stream = make_collectives(device);
  if (is_open_) return stream;
  const auto id = std::make_shared<UniqueId>();
  if (rank_ == 0) *id = make_id();
  companion_
      ->submit({.kind = OpKind::broadcast,
                .root = 0,
                .input = rank_ == 0 ? bytes_of(*id) : std::span<std::byte>(),
                .output = bytes_of(*id),
                .tag = "NCCL id",
                .timeout = membership().world->timeout,
                .count = sizeof(id->internal)},
               id)
      ->wait();
  Operation connecting = operation;
  connecting.timeout = std::max(operation.timeout, membership().world->timeout);
  stream.connect(*id, rank_, size_, connecting, sequence);
  stream.communicator().register_memory();
  is_open_ = true;
  return stream;
}

NcclStream& NcclGroup::message_stream(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  auto& stream = messages_[{operation.kind, operation.root}];
  if (!stream) {
    stream =
        std::make_unique<NcclStream>(std::make_shared<Communicator>(engine_, operation.device),
                                     stream_options([this, place = &stream](const Ticket& ticket) {
                                       compare_headers(ticket);
                                       open_message_stream(**place, ticket);
                                     }));
  }
  return *stream;
}

// The sender is rank 0 of the pair.
void NcclGroup::open_message_stream(NcclStream& stream, const Ticket& ticket) {
  if (stream.communicator().is_begun()) return;
  const bool sends = ticket.operation.kind == OpKind::send;
  const auto& [name, rank, members, world] = membership();
  const int other = ticket.operation.root;
  const std::string key = format("nccl/{}/{}>{}", name, sends ? rank : other, sends ? other : rank);
  UniqueId id{};
  if (sends) {
    id = make_id();
    world->store->set(key, to_text(id));
  } else {
    std::optional<std::string> text;
    watchdog_.wait(ticket.operation, ticket.sequence, Clock::now(), [&](milliseconds time) {
      try {
        text = world->store->get(key, Deadline(time));
      } catch (const TimeoutError&) {
        return false;
      }
      return true;
    });
    id = from_text(*text);
  }
  stream.connect(id, sends ? 0 : 1, 2, ticket.operation, ticket.sequence);
}

// The receiver finds out; the sender does not wait for that.
void NcclGroup::compare_headers(const Ticket& ticket) {
  const Operation& operation = ticket.operation;
  const bool sends = operation.kind == OpKind::send;
  if (announcements_) {
    Operation header = operation;
    header.finish = nullptr;
    const auto announced = announcements_->announce(std::move(header));
    if (!sends) announced->wait();
  }
  if (!headers_) return;
  const auto header = std::make_shared<fabric::Signature>(fabric::signature_of(operation));
  const fabric::Signature asked = *header;
  const auto bytes = std::as_writable_bytes(std::span(header.get(), 1));
  const auto exchange = headers_->submit({.kind = operation.kind,
                                          .root = operation.root,
                                          .input = sends ? bytes : std::span<std::byte>(),
                                          .output = sends ? std::span<std::byte>() : bytes,
                                          .timeout = operation.timeout,
                                          .count = sizeof(fabric::Signature)},
                                         header);
  if (sends) return;
  exchange->wait();
  fabric::check_message(membership().name, rank_, asked, *header);
}

void NcclGroup::check_device(const Operation& operation) const {
  const std::lock_guard lock(mutex_);
  const auto require = [&](NcclStream* stream) {
    if (stream == nullptr || stream->communicator().device() == operation.device) return;
    throw ConfigError(format(
        "[{}] rank {} of group '{}': the tensor is on device {}, must be on {} like those before",
        fabric::name_of(operation.kind), rank_, membership().name, operation.device,
        stream->communicator().device()));
  };
  require(collectives_.get());
  for (const auto& [key, stream] : messages_) require(stream.get());
}

std::exception_ptr NcclGroup::break_group(std::exception_ptr error) noexcept {
  std::string why = "the group is broken";
  try {
    watchdog_.fail(error);
  } catch (const std::exception& failure) {
    error = std::current_exception();
    why = failure.what();
  } catch (...) {
    error = std::current_exception();
  }
  for (detail::GroupImpl* group : {companion_.get(), announcements_.get(), headers_.get()}) {
    if (group != nullptr) group->abort(why);
  }
  // The collectives' last: an adopted communicator may be in a call that nothing ends.
  std::vector<NcclStream*> streams;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, stream] : messages_) streams.push_back(stream.get());
    streams.push_back(collectives_.get());
  }
  for (NcclStream* stream : streams) {
    if (stream != nullptr) stream->abort();
  }
  return error;
}

std::shared_ptr<detail::Pending> NcclGroup::submit(Operation operation,
                                                   std::shared_ptr<const void> memory) {
  if (operation.device < 0) {
    return rethrow_translated([&]() -> std::shared_ptr<detail::Pending> {
      return std::make_shared<HostPending>(
          shared_from_this(), companion_->submit(std::move(operation), std::move(memory)));
    });
  }
  check_device(operation);
  const uint64_t sequence = watchdog_.begin(operation);
  if (fabric::is_message(operation.kind)) {
    NcclStream& stream = message_stream(operation);
    auto ticket = stream.post(
        {.operation = std::move(operation), .sequence = sequence, .memory = std::move(memory)});
    return std::make_shared<NcclPending>(shared_from_this(), stream, std::move(ticket));
  }
  try {
    std::shared_ptr<detail::Pending> agreed;
    if (membership().world->check && size_ > 1) {
      Operation called = operation;
      called.finish = nullptr;
      agreed = companion_->announce(std::move(called));
    }
    // The first needs the companion for more than this.
    if (agreed && (!is_open_ || operation.count == 0 || agreed->done())) {
      watchdog_.wait_for(*agreed);
      agreed.reset();
    }
    // Of all_to_all a rank does not know whether the others have something to send.
    if (operation.kind != OpKind::all_to_all && operation.count == 0) {
      watchdog_.end(operation, sequence);
      return std::make_shared<Nothing>();
    }
    // NCCL's avg divides before it sums, which is right for floats alone.
    if (is_reduction(operation.kind) && operation.reduce == fabric::ReduceOp::avg &&
        !is_floating(operation.dtype)) {
      detail::Adapted form =
          detail::adapt_reduction(std::move(operation), std::move(memory), rank_, size_,
                                  engine_.runtime->torch_device(operation.device));
      operation = std::move(form.operation);
      memory = std::move(form.memory);
    }
    NcclStream& stream = open_collectives(operation.device, operation, sequence);
    // Launched in the call where all ranks have called it, else by the stream's thread when they
    // have.
    const bool by_thread = agreed || stream.has_posted();
    Ticket ticket{.operation = std::move(operation),
                  .sequence = sequence,
                  .memory = std::move(memory),
                  .agreed = std::move(agreed)};
    return std::make_shared<NcclPending>(
        shared_from_this(), stream,
        by_thread ? stream.post(std::move(ticket)) : stream.launch(std::move(ticket)));
  } catch (...) {
    std::rethrow_exception(break_group(std::current_exception()));
  }
}

// NCCL has no call that would name an algorithm, and kernels of ours for tensors on GPUs there are
// none: a strategy would be ignored for them.
void require_own_strategy(const detail::Membership& membership) {
  const layout::CommStrategy strategy = membership.world->strategy;
  if (strategy == layout::CommStrategy::all_reduce || membership.size() == 1) return;
  throw ConfigError(format(
      "[init] strategy {} is not supported with backend nccl, which chooses between rings and "
      "trees for tensors on GPUs itself (NCCL_ALGO overrides it); use strategy {}, or "
      "another backend",
      layout::name_of(strategy), layout::name_of(layout::CommStrategy::all_reduce)));
}

Engine real_engine() { return {library().api, cuda_runtime()}; }

}  // namespace

std::string problem() {
  if (cuda_runtime() == nullptr) return "this build has no CUDA";
  if (cuda_runtime()->devices().empty()) return "this process sees no CUDA device";
  return library().problem;
}

bool is_available() { return problem().empty(); }

std::string version() {
  const int number = library().version;
  return number == 0 ? ""
                     : format("NCCL {}.{}.{}", number / 10000, number / 100 % 100, number % 100);
}

std::shared_ptr<detail::GroupImpl> create(detail::Membership membership) {
  return factory(real_engine(), "nccl")(std::move(membership));
}

detail::Factory factory(const Engine& engine, const std::string& name) {
  return [engine, name](detail::Membership membership) -> std::shared_ptr<detail::GroupImpl> {
    require_own_strategy(membership);
    auto companion = detail::make_plain_group(membership, membership.world->host_backend);
    return std::make_shared<NcclGroup>(engine, std::move(membership), name, std::move(companion));
  };
}

std::shared_ptr<detail::GroupImpl> adopt(const Engine& engine, ncclComm* comm,
                                         std::shared_ptr<detail::GroupImpl> companion) {
  int device = 0, rank = 0, size = 0;
  for (const Result result :
       {engine.api->comm_cu_device(comm, &device), engine.api->comm_user_rank(comm, &rank),
        engine.api->comm_count(comm, &size)}) {
    if (result != Result::success)
      throw CommError(format("[adopt] NCCL: {}", engine.api->get_error_string(result)));
  }
  const detail::Membership& membership = companion->membership();
  require_own_strategy(membership);
  if (rank != membership.rank || size != membership.size()) {
    throw ConfigError(format(
        "[adopt] the communicator has rank {} of {}, the group for host memory '{}' has rank {} of "
        "{}; they must be the same",
        rank, size, membership.name, membership.rank, membership.size()));
  }
  if (companion->backend() == "none")
    throw ConfigError(
        "[adopt] the group for host memory does nothing; make it with "
        "InitOptions::force_backend_on_single_rank");
  detail::Membership ours = membership;
  ours.name += format(".{}/adopted", companion->next_split());
  auto group = std::make_shared<NcclGroup>(engine, std::move(ours), "nccl", std::move(companion));
  group->adopt(comm, device);
  return group;
}

}  // namespace lockstep::comm::nccl
