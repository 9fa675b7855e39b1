// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/backends/gloo/engine_calls.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "lockstep/comm/blocks.h"
#include "lockstep/comm/reduction_lowering.h"
#include "lockstep/fabric/reduce.h"
#include "lockstep/memory/tensor_bytes.h"

namespace lockstep::comm::gloo {
namespace {

using detail::Adapted;
using fabric::Operation;
using fabric::OpKind;

at::Tensor typed_tensor(std::span<std::byte> bytes, DType dtype) {
  return at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size() / size_of(dtype))},
                       at::TensorOptions().dtype(memory::to_scalar_type(dtype)));
}

c10d::ReduceOp::RedOpType to_c10d(fabric::ReduceOp op) {
  switch (op) {
    case fabric::ReduceOp::product:
      return c10d::ReduceOp::PRODUCT;
    case fabric::ReduceOp::min:
      return c10d::ReduceOp::MIN;
    case fabric::ReduceOp::max:
      return c10d::ReduceOp::MAX;
    default:
      return c10d::ReduceOp::SUM;
  }
}

Started start_all_gather(Engine& engine, const Operation& operation,
                         std::shared_ptr<const void> memory) {
  const size_t width = size_of(operation.dtype);
  std::vector<std::span<std::byte>> blocks;
  size_t at = 0;
  for (const int64_t count : operation.recv_counts) {
    blocks.push_back(operation.output.subspan(at, static_cast<size_t>(count) * width));
    at += blocks.back().size();
  }
  const bool even = std::all_of(blocks.begin(), blocks.end(), [&](const auto& block) {
    return block.size() == blocks[0].size();
  });
  if (even) {
    if (blocks[0].empty()) return {{}, std::move(memory), {}};
    std::vector<std::vector<at::Tensor>> outputs(1);
    for (const auto& block : blocks) outputs[0].push_back(bytes_tensor(block));
    std::vector<at::Tensor> inputs{bytes_tensor(operation.input)};
    c10d::AllgatherOptions options;
    options.timeout = engine_timeout(operation);
    return {{engine.allgather(outputs, inputs, options)}, std::move(memory), {}};
  }
  auto& mine = blocks[static_cast<size_t>(engine.getRank())];
  if (mine.data() != operation.input.data())
    std::copy(operation.input.begin(), operation.input.end(), mine.begin());
  Started started{{}, std::move(memory), {}};
  for (int rank = 0; rank < engine.getSize(); ++rank) {
    if (blocks[static_cast<size_t>(rank)].empty()) continue;
    std::vector<at::Tensor> tensors{bytes_tensor(blocks[static_cast<size_t>(rank)])};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    options.timeout = engine_timeout(operation);
    started.works.push_back(engine.broadcast(tensors, options));
  }
  return started;
}

Started start_all_to_all(Engine& engine, const Operation& operation,
                         std::shared_ptr<const void> memory) {
  const auto bytes = [&](std::vector<int64_t> counts) {
    for (auto& count : counts) count *= static_cast<int64_t>(size_of(operation.dtype));
    return counts;
  };
  at::Tensor output = bytes_tensor(operation.output), input = bytes_tensor(operation.input);
  std::vector<int64_t> receives = bytes(operation.recv_counts),
                       sends = bytes(operation.send_counts);
  c10d::AllToAllOptions options;
  options.timeout = engine_timeout(operation);
  return {{engine.alltoall_base(output, input, receives, sends, options)}, std::move(memory), {}};
}

Started start_reduce_scatter(Engine& engine, const Operation& operation,
                             std::shared_ptr<const void> memory) {
  if (operation.input.empty()) return {{}, std::move(memory), {}};
  const int64_t mine = operation.send_counts[static_cast<size_t>(engine.getRank())];
  const size_t block = static_cast<size_t>(mine) * size_of(operation.dtype);
  auto parts =
      std::make_shared<std::vector<std::byte>>(block * static_cast<size_t>(engine.getSize()));
  Operation exchange = operation;
  exchange.kind = OpKind::all_to_all;
  exchange.output = *parts;
  exchange.recv_counts = std::vector<int64_t>(static_cast<size_t>(engine.getSize()), mine);
  // Gloo writes to them as long as it likes, whatever becomes of the operation.
  memory = std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
      std::move(memory), parts);
  Started started = start_all_to_all(engine, exchange, std::move(memory));
  started.finish = [parts, block, mine, size = engine.getSize(), output = operation.output,
                    dtype = operation.dtype, reduce = operation.reduce] {
    std::vector<const std::byte*> inputs;
    for (int rank = 0; rank < size; ++rank)
      inputs.push_back(parts->data() + static_cast<size_t>(rank) * block);
    std::byte* target = output.data();
    fabric::reduce(dtype, reduce, std::span(&target, 1), inputs, static_cast<size_t>(mine));
  };
  return started;
}

}  // namespace

milliseconds engine_timeout(const Operation& operation) {
  return operation.timeout + milliseconds{500};
}

at::Tensor bytes_tensor(std::span<const std::byte> bytes) {
  // from_blob refuses null; an empty message needs some address.
  static std::byte nothing;
  return at::from_blob(bytes.empty() ? &nothing : const_cast<std::byte*>(bytes.data()),
                       {static_cast<int64_t>(bytes.size())}, at::kByte);
}

Started start(Engine& engine, const Operation& operation, std::shared_ptr<const void> memory) {
  const milliseconds timeout = engine_timeout(operation);
  switch (operation.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce: {
      if (operation.output.empty()) return {{}, std::move(memory), {}};
      Adapted adapted =
          detail::adapt_reduction(operation, std::move(memory), engine.getRank(), engine.getSize());
      std::vector<at::Tensor> tensors{
          typed_tensor(adapted.operation.output, adapted.operation.dtype)};
      if (operation.kind == OpKind::all_reduce) {
        c10d::AllreduceOptions options;
        options.reduceOp = to_c10d(adapted.operation.reduce);
        options.timeout = timeout;
        return {{engine.allreduce(tensors, options)},
                std::move(adapted.memory),
                std::move(adapted.operation.finish)};
      }
      // Gloo uses the tensors of the others as work space; ours stay as they are.
      if (engine.getRank() != operation.root) tensors[0] = tensors[0].clone();
      c10d::ReduceOptions options;
      options.reduceOp = to_c10d(adapted.operation.reduce);
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {{engine.reduce(tensors, options)},
              std::move(adapted.memory),
              std::move(adapted.operation.finish)};
    }
    case OpKind::broadcast: {
      if (operation.output.empty()) return {{}, std::move(memory), {}};
      std::vector<at::Tensor> tensors{bytes_tensor(operation.output)};
      c10d::BroadcastOptions options;
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {{engine.broadcast(tensors, options)}, std::move(memory), {}};
    }
    case OpKind::all_gather:
      return start_all_gather(engine, operation, std::move(memory));
    case OpKind::reduce_scatter:
      return start_reduce_scatter(engine, operation, std::move(memory));
    case OpKind::all_to_all:
      return start_all_to_all(engine, operation, std::move(memory));
    case OpKind::gather:
    case OpKind::scatter: {
      if (operation.count == 0) return {{}, std::move(memory), {}};
      const bool gathers = operation.kind == OpKind::gather;
      const size_t block = gathers ? operation.input.size() : operation.output.size();
      std::vector<std::vector<at::Tensor>> all;
      std::vector<at::Tensor> mine{bytes_tensor(gathers ? operation.input : operation.output)};
      if (engine.getRank() == operation.root) {
        const std::span<const std::byte> whole =
            gathers ? std::span<const std::byte>(operation.output) : operation.input;
        all.emplace_back();
        for (int rank = 0; rank < engine.getSize(); ++rank)
          all[0].push_back(bytes_tensor(whole.subspan(static_cast<size_t>(rank) * block, block)));
      }
      if (gathers) {
        c10d::GatherOptions options;
        options.rootRank = operation.root;
        options.timeout = timeout;
        return {{engine.gather(all, mine, options)}, std::move(memory), {}};
      }
      c10d::ScatterOptions options;
      options.rootRank = operation.root;
      options.timeout = timeout;
      return {{engine.scatter(mine, all, options)}, std::move(memory), {}};
    }
    default: {
      c10d::BarrierOptions options;
      options.timeout = timeout;
      return {{engine.barrier(options)}, std::move(memory), {}};
    }
  }
}

}  // namespace lockstep::comm::gloo
