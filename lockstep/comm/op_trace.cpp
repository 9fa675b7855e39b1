// SPDX-License-Identifier: Apache-2.0
#include "lockstep/comm/op_trace.h"

#include "lockstep/core/format.h"
#include "lockstep/flight/recorder.h"

namespace lockstep::comm::detail {

OperationTrace::OperationTrace(const Membership& membership, std::string engine,
                               std::string strategy)
    : group_(membership.name),
      engine_(std::move(engine)),
      strategy_(std::move(strategy)),
      members_(membership.members.begin(), membership.members.end()),
      world_rank_(membership.members[static_cast<size_t>(membership.rank)]),
      size_(membership.size()) {}

void OperationTrace::add(const fabric::Operation& operation, uint64_t sequence,
                         Clock::time_point start, Clock::time_point end) {
  if (operation.announced) return;
  flight::end(operation.record, end);
  if (!trace::enabled()) return;
  using fabric::OpKind;
  const bool message = fabric::is_message(operation.kind);
  const auto key =
      message ? std::pair(operation.kind, operation.root) : std::pair(OpKind::barrier, -1);
  const std::string row_name =
      message             ? format("{} {} of {}", name_of(operation.kind), operation.root, group_)
      : strategy_.empty() ? format("{} {}", engine_, group_)
                          : format("{} {} by {}", engine_, group_, strategy_);
  const std::lock_guard lock(mutex_);
  const auto row = rows_.try_emplace(key, world_rank_, row_name).first;
  row->second.add(
      "comm", name_of(operation.kind), start, end,
      format("\"group\":\"{}\",\"sequence\":{},\"dtype\":\"{}\",\"elements\":{},\"bytes\":{},"
             "\"ranks\":{},\"tag\":\"{}\",\"strategy\":\"{}\"{}{}",
             group_, sequence, name_of(operation.dtype), operation.count,
             std::max(operation.input.size(), operation.output.size()), size_, operation.tag,
             strategy_.empty() ? "all-reduce" : strategy_,
             message ? format(",\"peer\":{}", members_[static_cast<size_t>(operation.root)]) : "",
             operation.record != 0 ? format(",\"ticket\":{}", operation.record) : ""));
}

}  // namespace lockstep::comm::detail
