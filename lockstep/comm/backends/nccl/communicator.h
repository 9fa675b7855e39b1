// SPDX-License-Identifier: Apache-2.0
// A communicator of NCCL and the stream that its operations run on.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "lockstep/comm/backends/nccl/issue.h"

namespace lockstep::comm::nccl {

// Thread safe. NCCL is never called in a way that blocks, so that abort() comes through; but one
// that is adopted may have been made to block.
class Communicator {
 public:
  Communicator(const Engine& engine, int device);
  // Says good-bye to the others if nothing went wrong, and waits a moment for theirs.
  ~Communicator();
  // The former. Where there are several, first to those of all.
  void shutdown() noexcept;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Begins to connect with the others that have this id: is_settled() says when that is done.
  void begin(const UniqueId& id, int rank, int size);
  // One that the program has made, and will destroy.
  void adopt(ncclComm* comm, int rank, int size);
  bool is_begun() const;

  // Runs `call` with the communicator, but not if that has been aborted. False if NCCL continues
  // with it: then is_settled() says when it is done. Throws CommError with NCCL's words.
  bool call(const std::function<Result(const Seat&)>& call);
  // What was begun has been taken over by the stream. Throws as above, also for errors that NCCL
  // finds by itself.
  bool is_settled();
  // Ends whatever runs, here and soon at the others. Nothing can be called any more.
  void abort() noexcept;
  bool is_aborted() const;

  // Memory that NCCL allocates, and knows once register_memory() has been called after the ranks
  // are connected; null where this version has no such thing. It keeps the communicator alive.
  static std::shared_ptr<std::byte> allocate(const std::shared_ptr<Communicator>& communicator,
                                             size_t bytes);
  void register_memory();

  const Engine& engine() const { return engine_; }
  int device() const { return device_; }
  CUstream_st* stream() const { return seat_.stream; }

 private:
  std::string words(Result result) const;
  bool wait_for_good_byes();
  void free(std::byte* data) noexcept;

  const Engine engine_;
  const int device_;
  mutable std::mutex mutex_;
  Seat seat_;
  bool owned_ = true, aborted_ = false, leaving_ = false;
  // NCCL's name for a piece of memory, if it knows it already.
  struct MemoryRegistration {
    size_t bytes = 0;
    void* handle = nullptr;
  };
  std::map<void*, MemoryRegistration> memory_;
};

}  // namespace lockstep::comm::nccl
