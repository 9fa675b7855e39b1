// SPDX-License-Identifier: Apache-2.0
// The calls of MPI that an operation becomes. Private to mpi/.
#pragma once

#include <mpi.h>

#include <memory>
#include <vector>

#include "lockstep/fabric/operation.h"

namespace lockstep::comm::mpi {

// An MPI communicator that frees itself, unless MPI has ended.
class Communicator {
 public:
  // Of these ranks of `world`, which must all call this with the same tag.
  Communicator(MPI_Comm world, const std::vector<int>& members, int tag);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  std::unique_ptr<Communicator> duplicate() const;
  int rank() const { return rank_; }
  int size() const { return size_; }

  // Begins a collective; the operation's buffers and the vectors here must live until it is done.
  struct Running {
    std::vector<MPI_Request> requests;
    std::vector<int> send_counts, send_starts, recv_counts, recv_starts;
  };
  void begin(const fabric::Operation& operation, Running& running) const;
  // Runs a collective to its end. MPI's blocking calls move large data up to twice as fast as its
  // non-blocking ones.
  void run(const fabric::Operation& operation) const;

  // Messages of any size, cut into pieces that MPI can count.
  void begin_send(std::span<const std::byte> data, int peer, int tag,
                  std::vector<MPI_Request>& requests) const;
  void begin_recv(std::span<std::byte> data, int peer, int tag,
                  std::vector<MPI_Request>& requests) const;

 private:
  explicit Communicator(MPI_Comm comm);
  void exchange(const fabric::Operation& operation) const;

  MPI_Comm comm_ = MPI_COMM_NULL;
  int rank_ = 0, size_ = 0;
};

// After adapt_reduction.
MPI_Datatype to_mpi(DType dtype);
MPI_Op to_mpi(fabric::ReduceOp op);

}  // namespace lockstep::comm::mpi
