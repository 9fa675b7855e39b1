// SPDX-License-Identifier: Apache-2.0
// Tensors from stage to stage. Private: not installed.
//
// A message says first what it is made of, so shapes may change from micro-batch to micro-batch.
// Each peer's messages are taken in by a thread, because the memory for one is known only once its
// first part is there: so it all arrives overlapped with the computation. Sends are asynchronous
// anyway.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/comm/work.h"
#include "lockstep/parallel/pipeline/layer.h"

namespace lockstep::parallel::detail {

// One value at the door of a stage.
struct MessageKey {
  bool gradient = false;
  int microbatch = 0;
  int chunk = 0;  // of the rank that receives

  auto operator<=>(const MessageKey&) const = default;
};

class Mailbox {
 public:
  // Over a group of the pipeline's own. Tensors that are not on the CPU arrive on `device`. The
  // timeout is of every message, which may have to wait for all that other ranks compute first:
  // Progress finds out sooner that none will come.
  Mailbox(comm::Group group, c10::Device device, milliseconds timeout);
  // Does not wait for messages in flight.
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Between two ranks, messages are expected in the order in which they are sent.
  void expect(const MessageKey& key, int from);
  // Undefined tensors arrive as such; requires_grad() is carried along.
  void send(const Tensors& tensors, int to);
  // For a stage on the same rank.
  void put(const MessageKey& key, Tensors tensors);
  // Waits for it. Throws what went wrong on the way.
  Tensors take(const MessageKey& key);
  // All that was sent may be overwritten.
  void finish();
  // This rank gives up: so do the others. Thread safe.
  void abort(const std::string& why);

 private:
  struct Channel;
  struct Shared;  // with the receiving threads, which may be left behind

  std::shared_ptr<Shared> shared_;
  std::vector<comm::Work> sends_;
};

}  // namespace lockstep::parallel::detail
