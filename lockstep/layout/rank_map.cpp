// SPDX-License-Identifier: Apache-2.0
#include "lockstep/layout/rank_map.h"

#include <array>
#include <limits>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/enum_names.h"

namespace lockstep::layout {
namespace {

constexpr std::array<std::string_view, 3> kAxes = {"dp", "tp", "pp"};
constexpr std::array<std::string_view, 6> kOrders = {"pp_fastest", "tp_fastest", "dp-pp-tp",
                                                     "tp-dp-pp",   "tp-pp-dp",   "pp-tp-dp"};

}  // namespace

int64_t ParallelDims::world_size() const {
  int64_t product = 0;
  const bool overflow = __builtin_mul_overflow(int64_t{dp} * tp, int64_t{pp}, &product);
  return overflow ? std::numeric_limits<int64_t>::max() : product;
}

std::string ParallelDims::describe() const { return format("dp {} x tp {} x pp {}", dp, tp, pp); }

void ParallelDims::validate() const {
  if (dp < 1 || tp < 1 || pp < 1) {
    throw ConfigError(format("[parallel_dims] {}: every size must be at least 1", describe()));
  }
}

void ParallelDims::validate(int world_size) const {
  validate();
  if (this->world_size() != world_size) {
    throw ConfigError(format("[parallel_dims] {} = {}, must equal world size {}", describe(),
                             this->world_size(), world_size));
  }
}

std::string_view name_of(Axis axis) { return enum_name(kAxes, axis); }
std::string_view name_of(Order order) { return enum_name(kOrders, order); }

Order parse_order(std::string_view name) {
  if (name == "dp-tp-pp") return Order::pp_fastest;
  if (name == "pp-dp-tp") return Order::tp_fastest;
  return parse_enum<Order>("order of ranks", kOrders, name);
}

std::array<Axis, 3> axes_of(Order order) {
  using enum Axis;
  switch (order) {
    case Order::pp_fastest:
      return {dp, tp, pp};
    case Order::tp_fastest:
      return {pp, dp, tp};
    case Order::dp_pp_tp:
      return {dp, pp, tp};
    case Order::tp_dp_pp:
      return {tp, dp, pp};
    case Order::tp_pp_dp:
      return {tp, pp, dp};
    default:
      return {pp, tp, dp};
  }
}

int Coordinate::at(Axis axis) const { return axis == Axis::dp ? dp : axis == Axis::tp ? tp : pp; }

RankMap::RankMap(ParallelDims dims, Order order) : dims_(dims), order_(order), world_size_(0) {
  dims_.validate();
  if (dims_.world_size() > std::numeric_limits<int>::max()) {
    throw ConfigError(format("[rank_map] {} has too many ranks", dims_.describe()));
  }
  world_size_ = static_cast<int>(dims_.world_size());
}

int RankMap::size(Axis axis) const { return Coordinate{dims_.dp, dims_.tp, dims_.pp}.at(axis); }

int RankMap::stride(Axis axis) const {
  const std::array<Axis, 3> axes = axes_of(order_);
  int product = 1;
  for (size_t i = axes.size(); axes[i - 1] != axis; --i) product *= size(axes[i - 1]);
  return product;
}

Coordinate RankMap::coordinate_of(int rank) const {
  if (rank < 0 || rank >= world_size_) {
    throw ConfigError(format("[rank_map] rank {} is outside {}, must be at least 0 and below {}",
                             rank, dims_.describe(), world_size_));
  }
  const auto on = [&](Axis axis) { return rank / stride(axis) % size(axis); };
  return {on(Axis::dp), on(Axis::tp), on(Axis::pp)};
}

int RankMap::rank_at(const Coordinate& at) const {
  const auto outside = [&](Axis axis) { return at.at(axis) < 0 || at.at(axis) >= size(axis); };
  if (outside(Axis::dp) || outside(Axis::tp) || outside(Axis::pp)) {
    throw ConfigError(format("[rank_map] coordinate (dp {}, tp {}, pp {}) is outside {}", at.dp,
                             at.tp, at.pp, dims_.describe()));
  }
  return at.dp * stride(Axis::dp) + at.tp * stride(Axis::tp) + at.pp * stride(Axis::pp);
}

bool RankMap::is_head(Axis axis, int rank) const { return coordinate_of(rank).at(axis) == 0; }
bool RankMap::is_tail(Axis axis, int rank) const {
  return coordinate_of(rank).at(axis) == size(axis) - 1;
}

std::vector<int> RankMap::group(Axis axis, int rank) const {
  const int first = rank - coordinate_of(rank).at(axis) * stride(axis);
  std::vector<int> members(size(axis));
  for (int i = 0; i < size(axis); ++i) members[i] = first + i * stride(axis);
  return members;
}

std::vector<std::vector<int>> RankMap::groups(Axis axis) const {
  std::vector<std::vector<int>> all;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (is_head(axis, rank)) all.push_back(group(axis, rank));
  }
  return all;
}

std::string RankMap::group_id(Axis axis, int rank) const {
  const auto at = coordinate_of(rank);
  switch (axis) {
    case Axis::dp:
      return format("dp_group_tp{}_pp{}", at.tp, at.pp);
    case Axis::tp:
      return format("tp_group_dp{}_pp{}", at.dp, at.pp);
    default:
      return format("pp_group_dp{}_tp{}", at.dp, at.tp);
  }
}

std::vector<RankMap::NamedGroup> RankMap::named_groups() const {
  std::vector<NamedGroup> all;
  for (const Axis axis : {Axis::dp, Axis::tp, Axis::pp}) {
    for (std::vector<int>& members : groups(axis)) {
      const int first = members.front();
      all.push_back({group_id(axis, first), axis, coordinate_of(first), std::move(members)});
    }
  }
  return all;
}

std::optional<int> RankMap::next_stage(int rank) const {
  if (is_pipeline_tail(rank)) return std::nullopt;
  return next_stage_wrapped(rank);
}

std::optional<int> RankMap::previous_stage(int rank) const {
  if (is_pipeline_head(rank)) return std::nullopt;
  return previous_stage_wrapped(rank);
}

int RankMap::next_stage_wrapped(int rank) const {
  auto at = coordinate_of(rank);
  at.pp = (at.pp + 1) % dims_.pp;
  return rank_at(at);
}

int RankMap::previous_stage_wrapped(int rank) const {
  auto at = coordinate_of(rank);
  at.pp = (at.pp + dims_.pp - 1) % dims_.pp;
  return rank_at(at);
}

}  // namespace lockstep::layout
