// SPDX-License-Identifier: Apache-2.0
// Work of a device that is recorded once, as CUDA graphs, and then repeated without the work of the
// CPU that queued it. Private: not installed.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace lockstep::memory {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Queues the work again on the current stream. It reads what is now in the memory that it read,
  // and writes to the memory that it wrote.
  virtual void repeat() = 0;
};

// Graphs that are always repeated in the order in which they were recorded: one may use memory that
// another has let go.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  // Whether the free memory is at least twice the peak so far above what is allocated now: a graph
  // keeps what its work takes, and other work needs as much again.
  virtual bool has_room() const = 0;
  // The work that any thread queues on the current stream is recorded from here on, and not done.
  // The stream is not the default one. The work was done before, so that what it makes at first is
  // there, and does not wait for the device. torch's allocator gives back what it keeps unused.
  virtual void begin() = 0;
  // By any thread.
  virtual std::unique_ptr<DeviceGraph> end() = 0;
  // What was begun, if anything, will not be repeated.
  virtual void abandon() = 0;
};

// Null where this build or the device cannot.
std::unique_ptr<GraphRecorder> make_graph_recorder(c10::Device device);

// A stream that is not the default one, for work that is recorded; none on the CPU.
std::optional<c10::Stream> own_stream(c10::Device device);

// Makes the stream the current one for a scope: it begins behind what the one before has queued,
// which continues behind what was queued in the scope. Does nothing without a stream.
class OnStream {
 public:
  explicit OnStream(const std::optional<c10::Stream>& stream);
  ~OnStream();
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  c10::OptionalStreamGuard guard_;
};

}  // namespace lockstep::memory
