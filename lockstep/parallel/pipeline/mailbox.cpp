// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/pipeline/mailbox.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "lockstep/comm/collectives.h"
#include "lockstep/comm/control/abort.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/trace.h"

namespace lockstep::parallel::detail {
namespace {

constexpr int64_t kMaxTensors = 8, kMaxDims = 8;
constexpr int64_t kTensorWords = 4 + kMaxDims;  // kind, dtype, requires_grad, dims, sizes
constexpr int64_t kHeaderWords = 1 + kMaxTensors * kTensorWords;
enum TensorPlace : int64_t { kUndefined, kOnCpu, kOnDevice };

at::Tensor header_of(const Tensors& tensors) {
  if (static_cast<int64_t>(tensors.size()) > kMaxTensors) {
    throw ConfigError(format("[pipeline] a stage gives {} tensors to the next, must be at most {}",
                             tensors.size(), kMaxTensors));
  }
  const at::Tensor header = at::zeros({kHeaderWords}, at::kLong);
  int64_t* word = header.data_ptr<int64_t>();
  *word++ = static_cast<int64_t>(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    int64_t* const begin = word;
    word += kTensorWords;
    if (!tensor.defined()) continue;
    if (tensor.dim() > kMaxDims || tensor.layout() != at::kStrided) {
      throw ConfigError(
          format("[pipeline] a stage gives a tensor of {} dimensions and layout {} to the next, "
                 "must be dense with at most {}",
                 tensor.dim(), c10::str(tensor.layout()), kMaxDims));
    }
    begin[0] = tensor.is_cpu() ? kOnCpu : kOnDevice;
    begin[1] = static_cast<int64_t>(tensor.scalar_type());
    begin[2] = tensor.requires_grad() ? 1 : 0;
    begin[3] = tensor.dim();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) begin[4 + dim] = tensor.size(dim);
  }
  return header;
}

// What arrived, in host memory, unless the group brings it to the device. It goes there when it is
// taken, by the thread and the stream that use it; what the group brings is waited for then.
struct Message {
  at::Tensor header;
  Tensors values;
  std::vector<comm::Work> arriving = {};
};

// `place` is where the group brings tensors of the device.
Message message_of(at::Tensor header, c10::Device place) {
  const int64_t* word = header.data_ptr<int64_t>();
  Tensors values(static_cast<size_t>(*word++));
  for (at::Tensor& value : values) {
    const int64_t* const begin = word;
    word += kTensorWords;
    if (begin[0] == kUndefined) continue;
    value = at::empty(at::IntArrayRef(begin + 4, static_cast<size_t>(begin[3])),
                      at::TensorOptions()
                          .dtype(static_cast<at::ScalarType>(begin[1]))
                          .device(begin[0] == kOnDevice ? place : c10::Device(at::kCPU)));
  }
  return {std::move(header), std::move(values)};
}

Tensors unpack(Message message, c10::Device device) {
  for (comm::Work& work : message.arriving) work.wait();
  const int64_t* word = message.header.data_ptr<int64_t>() + 1;
  for (at::Tensor& value : message.values) {
    const int64_t* const begin = word;
    word += kTensorWords;
    if (!value.defined()) continue;
    if (begin[0] == kOnDevice && !value.is_cpu()) {
      // It was made by another thread: its memory may serve others only after this one's stream.
      value.record_stream(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    }
    if (begin[0] == kOnDevice) value = value.to(device);
    value.requires_grad_(begin[2] != 0);
  }
  return std::move(message.values);
}

bool has_values(const at::Tensor& tensor) { return tensor.defined() && tensor.numel() > 0; }

}  // namespace

// What one peer sends, taken in by a thread.
struct Mailbox::Channel {
  std::deque<MessageKey> expected;
  bool busy = false;  // receiving
  std::thread thread;
};

struct Mailbox::Shared {
  Message receive(int from) const;
  comm::CollectiveOptions patient() const;
  void run(int from, Channel& channel);

  comm::Group group;
  c10::Device device = at::kCPU;
  c10::Device place = at::kCPU;  // where the group brings what is on the device
  milliseconds timeout{};
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int, Channel> channels;  // by peer
  std::map<MessageKey, Message> arrived;
  std::map<MessageKey, Tensors> handed_over;  // by stages of this rank
  std::exception_ptr error;
  bool stopping = false;
};

comm::CollectiveOptions Mailbox::Shared::patient() const { return {.timeout = timeout}; }

Message Mailbox::Shared::receive(int from) const {
  at::Tensor header = at::empty({kHeaderWords}, at::kLong);
  comm::recv(header, from, group, patient()).wait();
  Message message = message_of(std::move(header), place);
  std::vector<comm::Work> parts;
  for (const at::Tensor& value : message.values) {
    if (!has_values(value)) continue;
    (value.is_cpu() ? parts : message.arriving)
        .push_back(comm::recv(value, from, group, patient()));
  }
  for (comm::Work& part : parts) part.wait();
  return message;
}

void Mailbox::Shared::run(int from, Channel& channel) {
  const comm::ExcludeBlockedTime exclude;
  trace::name_thread(group.members()[static_cast<size_t>(group.rank())],
                     format("pipeline, from {}", from));
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [&] { return stopping || error || !channel.expected.empty(); });
    if (stopping || error) return;
    const MessageKey key = channel.expected.front();
    channel.expected.pop_front();
    channel.busy = true;
    lock.unlock();
    Message message;
    std::exception_ptr failure;
    try {
      message = receive(from);
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    channel.busy = false;
    if (failure && !error) error = failure;
    if (!failure) arrived[key] = std::move(message);
    changed.notify_all();
  }
}

Mailbox::Mailbox(comm::Group group, c10::Device device, milliseconds timeout)
    : shared_(std::make_shared<Shared>()) {
  shared_->group = std::move(group);
  shared_->device = device;
  if (comm::uses_device_memory(shared_->group, device)) shared_->place = device;
  shared_->timeout = timeout;
}

Mailbox::~Mailbox() {
  bool stuck = false;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
    for (const auto& [from, channel] : shared_->channels) stuck = stuck || channel.busy;
    shared_->changed.notify_all();
  }
  // What they wait for will not be sent.
  const bool ended = !stuck || comm::interrupt(shared_->group, "the pipeline was ended");
  for (auto& [from, channel] : shared_->channels) {
    if (ended) {
      channel.thread.join();
    } else {
      channel.thread.detach();  // it holds all that it uses
    }
  }
}

void Mailbox::expect(const MessageKey& key, int from) {
  const std::lock_guard lock(shared_->mutex);
  Channel& channel = shared_->channels[from];
  channel.expected.push_back(key);
  if (!channel.thread.joinable()) {
    channel.thread =
        std::thread([shared = shared_, from, &channel] { shared->run(from, channel); });
  }
  shared_->changed.notify_all();
}

void Mailbox::send(const Tensors& tensors, int to) {
  std::erase_if(sends_, [](comm::Work& work) {
    if (!work.done()) return false;
    work.wait();  // throws what went wrong
    return true;
  });
  sends_.push_back(comm::send(header_of(tensors), to, shared_->group, shared_->patient()));
  for (const at::Tensor& tensor : tensors) {
    if (has_values(tensor)) {
      sends_.push_back(
          comm::send(tensor.detach().contiguous(), to, shared_->group, shared_->patient()));
    }
  }
}

void Mailbox::put(const MessageKey& key, Tensors tensors) {
  shared_->handed_over[key] = std::move(tensors);
}

Tensors Mailbox::take(const MessageKey& key) {
  // Only the thread that computes hands over and takes.
  if (auto own = shared_->handed_over.extract(key)) return std::move(own.mapped());
  std::unique_lock lock(shared_->mutex);
  auto found = shared_->arrived.find(key);
  if (found == shared_->arrived.end()) {
    const comm::BlockedTime blocked(shared_->group);
    shared_->changed.wait(lock, [&] {
      found = shared_->arrived.find(key);
      return found != shared_->arrived.end() || shared_->error;
    });
    if (found == shared_->arrived.end()) std::rethrow_exception(shared_->error);
  }
  Message message = std::move(found->second);
  shared_->arrived.erase(found);
  lock.unlock();
  return unpack(std::move(message), shared_->device);
}

void Mailbox::finish() {
  for (comm::Work& work : sends_) work.wait();
  sends_.clear();
}

void Mailbox::abort(const std::string& why) { comm::abort(shared_->group, why); }

}  // namespace lockstep::parallel::detail
