// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/mpi/communicator.h"

#include <algorithm>
#include <climits>
#include <cstring>
#include <numeric>

#include "lockstep/comm/backends/mpi/runtime.h"
#include "lockstep/fabric/reduce.h"

namespace lockstep::comm::mpi {
namespace {

using fabric::Operation;
using fabric::OpKind;

constexpr size_t kPieceBytes = size_t{1} << 30;  // MPI counts in int

int to_int(size_t value) { return static_cast<int>(value); }

// Counts and starts of the blocks, in elements of `width` bytes.
void lay_out(const std::vector<int64_t>& blocks, size_t width, std::vector<int>& counts,
             std::vector<int>& starts) {
  size_t at = 0;
  for (const int64_t block : blocks) {
    counts.push_back(to_int(static_cast<size_t>(block) * width));
    starts.push_back(to_int(at));
    at += static_cast<size_t>(block) * width;
  }
}

// All counts and starts of the call fit an int, on every rank: all must take the same of the two
// ways, so this looks only at what they agree on. The blocks of all_to_all are each rank's own.
bool fits(const Operation& operation, int ranks) {
  const bool by_block = operation.kind == OpKind::gather || operation.kind == OpKind::scatter;
  const size_t bytes = static_cast<size_t>(operation.count) * size_of(operation.dtype);
  return operation.kind != OpKind::all_to_all &&
         bytes * (by_block ? static_cast<size_t>(ranks) : 1) <= INT_MAX;
}

const void* in_place_or(const Operation& operation) {
  return operation.input.data() == operation.output.data() ? MPI_IN_PLACE : operation.input.data();
}

// The block that the root keeps, which MPI wants named where it stays in its place.
const void* gathered_from(const Operation& operation, int rank) {
  const bool stays = rank == operation.root &&
                     operation.input.data() == operation.output.data() + static_cast<size_t>(rank) *
                                                                             operation.input.size();
  return stays ? MPI_IN_PLACE : operation.input.data();
}
void* scattered_to(const Operation& operation, int rank) {
  const bool stays =
      rank == operation.root &&
      operation.output.data() ==
          operation.input.data() + static_cast<size_t>(rank) * operation.output.size();
  return stays ? MPI_IN_PLACE : operation.output.data();
}

}  // namespace

MPI_Datatype to_mpi(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return MPI_DOUBLE;
    case DType::float32:
      return MPI_FLOAT;
    case DType::int64:
      return MPI_INT64_T;
    case DType::int32:
      return MPI_INT32_T;
    case DType::int8:
      return MPI_INT8_T;
    default:
      return MPI_UINT8_T;
  }
}

MPI_Op to_mpi(fabric::ReduceOp op) {
  switch (op) {
    case fabric::ReduceOp::product:
      return MPI_PROD;
    case fabric::ReduceOp::min:
      return MPI_MIN;
    case fabric::ReduceOp::max:
      return MPI_MAX;
    default:
      return MPI_SUM;
  }
}

Communicator::Communicator(MPI_Comm comm) : comm_(comm) {
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
}

Communicator::Communicator(MPI_Comm world, const std::vector<int>& members, int tag) {
  MPI_Group all = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
  check_mpi(MPI_Comm_group(world, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, to_int(members.size()), members.data(), &group), "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(world, group, tag, &comm_), "MPI_Comm_create_group");
  MPI_Group_free(&group);
  MPI_Group_free(&all);
  MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
  MPI_Comm_rank(comm_, &rank_);
  MPI_Comm_size(comm_, &size_);
}

Communicator::~Communicator() {
  // MPI_Comm_free is collective; a destructor must not wait for others. Communicators end with MPI.
}

std::unique_ptr<Communicator> Communicator::duplicate() const {
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(comm_, &copy), "MPI_Comm_dup");
  return std::unique_ptr<Communicator>(new Communicator(copy));
}

void Communicator::begin(const Operation& op, Running& running) const {
  running.requests.resize(1);
  MPI_Request* request = running.requests.data();
  const size_t width = size_of(op.dtype);
  const int count = to_int(op.output.size() / width), bytes = to_int(op.output.size());
  const std::byte* in = op.input.data();
  std::byte* out = op.output.data();
  switch (op.kind) {
    case OpKind::all_reduce:
      return check_mpi(MPI_Iallreduce(in_place_or(op), out, count, to_mpi(op.dtype),
                                      to_mpi(op.reduce), comm_, request),
                       "MPI_Iallreduce");
    case OpKind::reduce:
      return check_mpi(MPI_Ireduce(rank_ == op.root ? in_place_or(op) : in, out, count,
                                   to_mpi(op.dtype), to_mpi(op.reduce), op.root, comm_, request),
                       "MPI_Ireduce");
    case OpKind::broadcast:
      return check_mpi(MPI_Ibcast(out, bytes, MPI_BYTE, op.root, comm_, request), "MPI_Ibcast");
    case OpKind::all_gather: {
      lay_out(op.recv_counts, width, running.recv_counts, running.recv_starts);
      const bool in_place = in == out + running.recv_starts[static_cast<size_t>(rank_)];
      return check_mpi(
          MPI_Iallgatherv(in_place ? MPI_IN_PLACE : static_cast<const void*>(in),
                          to_int(op.input.size()), MPI_BYTE, out, running.recv_counts.data(),
                          running.recv_starts.data(), MPI_BYTE, comm_, request),
          "MPI_Iallgatherv");
    }
    case OpKind::reduce_scatter:
      lay_out(op.send_counts, 1, running.send_counts, running.send_starts);
      return check_mpi(MPI_Ireduce_scatter(in, out, running.send_counts.data(), to_mpi(op.dtype),
                                           to_mpi(op.reduce), comm_, request),
                       "MPI_Ireduce_scatter");
    case OpKind::all_to_all:
      lay_out(op.send_counts, width, running.send_counts, running.send_starts);
      lay_out(op.recv_counts, width, running.recv_counts, running.recv_starts);
      return check_mpi(MPI_Ialltoallv(in, running.send_counts.data(), running.send_starts.data(),
                                      MPI_BYTE, out, running.recv_counts.data(),
                                      running.recv_starts.data(), MPI_BYTE, comm_, request),
                       "MPI_Ialltoallv");
    case OpKind::gather:
      return check_mpi(MPI_Igather(gathered_from(op, rank_), to_int(op.input.size()), MPI_BYTE, out,
                                   to_int(op.input.size()), MPI_BYTE, op.root, comm_, request),
                       "MPI_Igather");
    case OpKind::scatter:
      return check_mpi(MPI_Iscatter(in, bytes, MPI_BYTE, scattered_to(op, rank_), bytes, MPI_BYTE,
                                    op.root, comm_, request),
                       "MPI_Iscatter");
    default:
      return check_mpi(MPI_Ibarrier(comm_, request), "MPI_Ibarrier");
  }
}

void Communicator::run(const Operation& op) const {
  const size_t width = size_of(op.dtype);
  const std::byte* in = op.input.data();
  std::byte* out = op.output.data();
  if (op.kind == OpKind::all_reduce || op.kind == OpKind::reduce || op.kind == OpKind::broadcast) {
    const bool in_place = in == out;
    for (size_t at = 0; at < op.output.size(); at += kPieceBytes) {
      const size_t bytes = std::min(kPieceBytes, op.output.size() - at);
      const void* source = in_place && (op.kind == OpKind::all_reduce || rank_ == op.root)
                               ? MPI_IN_PLACE
                               : static_cast<const void*>(in + at);
      if (op.kind == OpKind::all_reduce) {
        check_mpi(MPI_Allreduce(source, out + at, to_int(bytes / width), to_mpi(op.dtype),
                                to_mpi(op.reduce), comm_),
                  "MPI_Allreduce");
      } else if (op.kind == OpKind::reduce) {
        check_mpi(MPI_Reduce(source, out + at, to_int(bytes / width), to_mpi(op.dtype),
                             to_mpi(op.reduce), op.root, comm_),
                  "MPI_Reduce");
      } else {
        check_mpi(MPI_Bcast(out + at, to_int(bytes), MPI_BYTE, op.root, comm_), "MPI_Bcast");
      }
    }
    return;
  }
  if (!fits(op, size_)) return exchange(op);
  std::vector<int> send_counts, send_starts, recv_counts, recv_starts;
  switch (op.kind) {
    case OpKind::all_gather: {
      lay_out(op.recv_counts, width, recv_counts, recv_starts);
      const bool in_place = in == out + recv_starts[static_cast<size_t>(rank_)];
      const void* source = in_place ? MPI_IN_PLACE : static_cast<const void*>(in);
      const bool even = std::all_of(recv_counts.begin(), recv_counts.end(),
                                    [&](int c) { return c == recv_counts[0]; });
      if (even)
        return check_mpi(
            MPI_Allgather(source, recv_counts[0], MPI_BYTE, out, recv_counts[0], MPI_BYTE, comm_),
            "MPI_Allgather");
      return check_mpi(MPI_Allgatherv(source, to_int(op.input.size()), MPI_BYTE, out,
                                      recv_counts.data(), recv_starts.data(), MPI_BYTE, comm_),
                       "MPI_Allgatherv");
    }
    case OpKind::reduce_scatter:
      lay_out(op.send_counts, 1, send_counts, send_starts);
      return check_mpi(MPI_Reduce_scatter(in, out, send_counts.data(), to_mpi(op.dtype),
                                          to_mpi(op.reduce), comm_),
                       "MPI_Reduce_scatter");
    case OpKind::gather:
      return check_mpi(MPI_Gather(gathered_from(op, rank_), to_int(op.input.size()), MPI_BYTE, out,
                                  to_int(op.input.size()), MPI_BYTE, op.root, comm_),
                       "MPI_Gather");
    default:
      return check_mpi(MPI_Scatter(in, to_int(op.output.size()), MPI_BYTE, scattered_to(op, rank_),
                                   to_int(op.output.size()), MPI_BYTE, op.root, comm_),
                       "MPI_Scatter");
  }
}

// all_to_all, and collectives whose counts or offsets do not fit an int, as messages between all
// pairs.
void Communicator::exchange(const Operation& op) const {
  const auto n = static_cast<size_t>(size_);
  const size_t width = size_of(op.dtype);
  const bool reduces = op.kind == OpKind::reduce_scatter;
  const auto me = static_cast<size_t>(rank_), root = static_cast<size_t>(std::max(0, op.root));
  std::vector<std::span<const std::byte>> sends(n);
  std::vector<std::span<std::byte>> receives(n);
  const auto cut = [&](auto whole, const std::vector<int64_t>& counts, auto& blocks) {
    size_t at = 0;
    for (size_t rank = 0; rank < n; ++rank) {
      blocks[rank] = whole.subspan(at, static_cast<size_t>(counts[rank]) * width);
      at += blocks[rank].size();
    }
  };
  std::vector<std::byte> parts;
  switch (op.kind) {
    case OpKind::all_gather:
      std::fill(sends.begin(), sends.end(), op.input);
      cut(op.output, op.recv_counts, receives);
      break;
    case OpKind::reduce_scatter:
      parts.resize(op.output.size() * n);
      cut(op.input, op.send_counts, sends);
      cut(std::span(parts), std::vector<int64_t>(n, op.send_counts[me]), receives);
      break;
    case OpKind::all_to_all:
      cut(op.input, op.send_counts, sends);
      cut(op.output, op.recv_counts, receives);
      break;
    case OpKind::gather:
      sends[root] = op.input;
      if (me == root) cut(op.output, std::vector<int64_t>(n, op.count), receives);
      break;
    default:  // scatter
      if (me == root) cut(op.input, std::vector<int64_t>(n, op.count), sends);
      receives[root] = op.output;
  }
  std::vector<MPI_Request> requests;
  for (size_t step = 1; step < n; ++step) {
    const size_t from = (me + step) % n;
    begin_recv(receives[from], static_cast<int>(from), 1, requests);
  }
  for (size_t step = 1; step < n; ++step) {
    const size_t to = (me + n - step) % n;
    begin_send(sends[to], static_cast<int>(to), 1, requests);
  }
  if (!sends[me].empty() && sends[me].data() != receives[me].data())
    std::memmove(receives[me].data(), sends[me].data(), sends[me].size());
  check_mpi(MPI_Waitall(to_int(requests.size()), requests.data(), MPI_STATUSES_IGNORE),
            "MPI_Waitall");
  if (reduces) {
    std::vector<const std::byte*> inputs;
    for (const auto& block : receives) inputs.push_back(block.data());
    std::byte* output = op.output.data();
    fabric::reduce(op.dtype, op.reduce, std::span(&output, 1), inputs, op.output.size() / width);
  }
}

void Communicator::begin_send(std::span<const std::byte> data, int peer, int tag,
                              std::vector<MPI_Request>& requests) const {
  size_t at = 0;
  do {
    const size_t bytes = std::min(kPieceBytes, data.size() - at);
    check_mpi(MPI_Isend(data.data() + at, to_int(bytes), MPI_BYTE, peer, tag, comm_,
                        &requests.emplace_back()),
              "MPI_Isend");
    at += bytes;
  } while (at < data.size());
}

void Communicator::begin_recv(std::span<std::byte> data, int peer, int tag,
                              std::vector<MPI_Request>& requests) const {
  size_t at = 0;
  do {
    const size_t bytes = std::min(kPieceBytes, data.size() - at);
    check_mpi(MPI_Irecv(data.data() + at, to_int(bytes), MPI_BYTE, peer, tag, comm_,
                        &requests.emplace_back()),
              "MPI_Irecv");
    at += bytes;
  } while (at < data.size());
}

}  // namespace lockstep::comm::mpi
