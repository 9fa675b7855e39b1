// The promise of a running operation.
#pragma once

#include <memory>

namespace lockstep::comm {

namespace detail {
class Pending;
}

// A value: copies share the operation. Thread safe, except that one thread at a time may wait.
// The operation goes on, and keeps its tensors alive, if the handle is dropped; but results of
// tensors that had to be copied (non-contiguous ones, those on a device, 16-bit floats on some
// backends) arrive only in wait().
class [[nodiscard]] Work {
 public:
  Work() = default;  // already done
  explicit Work(std::shared_ptr<detail::Pending> pending) : pending_(std::move(pending)) {}

  // Returns when the operation is complete. Throws what went wrong: TimeoutError, PeerLost,
  // MismatchError.
  void wait();
  bool done() const;

 private:
  std::shared_ptr<detail::Pending> pending_;
};

}  // namespace lockstep::comm
