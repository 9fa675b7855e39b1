// SPDX-License-Identifier: Apache-2.0
// The data, tensor and pipeline axes, and where each rank stands on them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::layout {

// Sizes of the three parallel axes.
struct ParallelDims {
  int dp = 1;  // replicas of the model, each with its own data
  int tp = 1;  // parts of every large matrix
  int pp = 1;  // stages of consecutive layers

  // dp * tp * pp; the largest int64_t where that does not fit.
  int64_t world_size() const;
  std::string describe() const;  // "dp 2 x tp 2 x pp 3"

  // Throws ConfigError unless every size is at least 1 and, in the second form, their product is
  // the world size.
  void validate() const;
  void validate(int world_size) const;

  bool operator==(const ParallelDims&) const = default;
};

enum class Axis { dp, tp, pp };
// Which axes neighbouring ranks differ on. A permutation is spelled as the axes of a mesh are,
// slowest first: in "tp-dp-pp" neighbouring ranks are neighbouring stages.
enum class Order {
  pp_fastest,  // "dp-tp-pp": neighbouring ranks are neighbouring stages, then tp, dp slowest
  tp_fastest,  // "pp-dp-tp": neighbouring ranks share a layer, as Megatron lays them out
  dp_pp_tp,
  tp_dp_pp,
  tp_pp_dp,
  pp_tp_dp
};

std::string_view name_of(Axis axis);
std::string_view name_of(Order order);  // "pp_fastest", "tp_fastest", "dp-pp-tp" ...
// Also takes the permutations that have names, "dp-tp-pp" and "pp-dp-tp". ConfigError for others.
Order parse_order(std::string_view name);
std::array<Axis, 3> axes_of(Order order);  // slowest first

struct Coordinate {
  int dp = 0, tp = 0, pp = 0;

  int at(Axis axis) const;
  bool operator==(const Coordinate&) const = default;
};

// A value, the same on every rank. A rank or coordinate outside the map is a ConfigError.
class RankMap {
 public:
  explicit RankMap(ParallelDims dims, Order order = Order::pp_fastest);

  const ParallelDims& dims() const { return dims_; }
  Order order() const { return order_; }
  int world_size() const { return world_size_; }
  int size(Axis axis) const;

  Coordinate coordinate_of(int rank) const;
  int rank_at(const Coordinate& coordinate) const;

  // First and last of the rank's group on the axis.
  bool is_head(Axis axis, int rank) const;
  bool is_tail(Axis axis, int rank) const;
  bool is_pipeline_head(int rank) const { return is_head(Axis::pp, rank); }
  bool is_pipeline_tail(int rank) const { return is_tail(Axis::pp, rank); }

  // The ranks that differ from `rank` on this axis only, itself included, in axis order.
  std::vector<int> group(Axis axis, int rank) const;
  // Every group of the axis, ordered by first member: each rank is in exactly one.
  std::vector<std::vector<int>> groups(Axis axis) const;
  // "dp_group_tp0_pp1", "tp_group_dp0_pp1", "pp_group_dp0_tp1": the same for all members of a
  // group.
  std::string group_id(Axis axis, int rank) const;
  // All of them, axis by axis, with the coordinate of the first member.
  struct NamedGroup {
    std::string id = {};
    Axis axis = Axis::dp;
    Coordinate first = {};
    std::vector<int> members = {};
  };
  std::vector<NamedGroup> named_groups() const;

  // The neighbouring stage's rank; none past the ends.
  std::optional<int> next_stage(int rank) const;
  std::optional<int> previous_stage(int rank) const;
  // The same on a ring, as an interleaved schedule goes: the last stage is followed by the first.
  int next_stage_wrapped(int rank) const;
  int previous_stage_wrapped(int rank) const;

  bool operator==(const RankMap&) const = default;

 private:
  int stride(Axis axis) const;

  ParallelDims dims_;
  Order order_;
  int world_size_;
};

}  // namespace lockstep::layout
