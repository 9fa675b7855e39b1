// SPDX-License-Identifier: Apache-2.0
#include "lockstep/mesh/mesh.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/layout/shard_math.h"

namespace lockstep::mesh {
namespace {

std::string describe_axes(const std::vector<Axis>& axes) {
  std::vector<std::string> parts;
  parts.reserve(axes.size());
  for (const auto& axis : axes) parts.push_back(format("{} {}", axis.name, axis.size));
  return parts.empty() ? "no axes" : join(parts, " x ");
}

void validate(const std::vector<Axis>& axes, int group_size) {
  std::set<std::string> names;
  int64_t product = 1;
  for (const auto& axis : axes) {
    if (axis.name.empty()) throw ConfigError("[mesh] an axis has no name");
    if (!names.insert(axis.name).second) {
      throw ConfigError(
          format("[mesh] {}: axis {} is named twice", describe_axes(axes), axis.name));
    }
    if (axis.size < 1) {
      throw ConfigError(format("[mesh] {}: axis {} has size {}, must be at least 1",
                               describe_axes(axes), axis.name, axis.size));
    }
    // A product past the group's size is wrong already: stop it from growing past int64_t.
    product = std::min(product * axis.size, int64_t{1} << 31);
  }
  if (product != group_size) {
    throw ConfigError(format("[mesh] {} = {}, must equal group size {}", describe_axes(axes),
                             product, group_size));
  }
}

}  // namespace

struct Mesh::Grid {
  comm::Group group;
  std::vector<Axis> axes;
  std::vector<int> coordinate;                        // of this rank
  std::map<std::vector<size_t>, comm::Group> groups;  // by axes, in the order of the group's ranks

  // Row-major number of this rank among the ranks of the given axes.
  int index_over(const std::vector<size_t>& selected) const {
    int index = 0;
    for (const auto place : selected) index = index * axes[place].size + coordinate[place];
    return index;
  }

  // Collective: one group for every place on the axes that are not selected.
  void make_group(const std::vector<size_t>& selected) {
    std::vector<size_t> others;
    for (size_t place = 0; place < axes.size(); ++place) {
      if (std::find(selected.begin(), selected.end(), place) == selected.end()) {
        others.push_back(place);
      }
    }
    groups.emplace(selected, group.split_named(index_over(others), index_over(selected),
                                               group_id(selected, others)));
  }

  // "dp_group_tp0_pp1": the axes of the group, and where it lies on the others, as
  // layout::RankMap::group_id has it whatever the order of the mesh's axes.
  std::string group_id(const std::vector<size_t>& selected, std::vector<size_t> others) const {
    std::vector<std::string> names;
    for (const size_t place : selected) names.push_back(axes[place].name);
    const auto usual_place = [&](size_t place) {
      constexpr std::array<std::string_view, 3> kUsual = {"dp", "tp", "pp"};
      return std::ranges::find(kUsual, axes[place].name) - kUsual.begin();
    };
    std::ranges::stable_sort(others, {}, usual_place);
    std::string id = join(names, "-") + "_group";
    for (const size_t place : others) id += format("_{}{}", axes[place].name, coordinate[place]);
    return id;
  }
};

Mesh::Mesh() : Mesh(comm::Group(), std::vector<Axis>()) {}

Mesh::Mesh(comm::Group group, std::vector<Axis> axes) : grid_(std::make_shared<Grid>()) {
  validate(axes, group.size());
  grid_->group = std::move(group);
  grid_->axes = std::move(axes);
  grid_->coordinate.resize(grid_->axes.size());
  int rest = grid_->group.rank();
  for (size_t place = grid_->axes.size(); place-- > 0;) {
    grid_->coordinate[place] = rest % grid_->axes[place].size;
    rest /= grid_->axes[place].size;
  }
  selected_.resize(grid_->axes.size());
  std::iota(selected_.begin(), selected_.end(), size_t{0});
  // An axis has a group of its own even where it spans the whole mesh, so that work on one never
  // has to be ordered with work on the other.
  for (const auto place : selected_) grid_->make_group({place});
  if (selected_.size() != 1) grid_->groups[selected_] = grid_->group;
}

Mesh::Mesh(std::shared_ptr<Grid> grid, std::vector<size_t> selected)
    : grid_(std::move(grid)), selected_(std::move(selected)) {}

Mesh Mesh::linear(comm::Group group, std::string axis) {
  const int size = group.size();
  return Mesh(std::move(group), {{std::move(axis), size}});
}

Mesh Mesh::square(comm::Group group, std::array<std::string, 2> axes) {
  const auto sizes = layout::nearly_square(group.size());
  return Mesh(std::move(group), {{axes[0], sizes[0]}, {axes[1], sizes[1]}});
}

Mesh Mesh::cube(comm::Group group, std::array<std::string, 3> axes) {
  const auto sizes = layout::nearly_cubic(group.size());
  return Mesh(std::move(group), {{axes[0], sizes[0]}, {axes[1], sizes[1]}, {axes[2], sizes[2]}});
}

Mesh Mesh::parallel(comm::Group group, const layout::ParallelDims& dims, layout::Order order) {
  dims.validate(group.size());
  const layout::RankMap map(dims, order);
  std::vector<Axis> axes;
  for (const layout::Axis axis : layout::axes_of(order))
    axes.push_back({std::string(layout::name_of(axis)), map.size(axis)});
  return Mesh(std::move(group), std::move(axes));
}

const Axis& Mesh::axis(size_t place) const { return grid_->axes[place]; }

std::vector<Axis> Mesh::axes() const {
  std::vector<Axis> all;
  for (const auto place : selected_) all.push_back(axis(place));
  return all;
}

std::vector<std::string> Mesh::axis_names() const {
  std::vector<std::string> names;
  for (const auto place : selected_) names.push_back(axis(place).name);
  return names;
}

std::vector<int> Mesh::shape() const {
  std::vector<int> sizes;
  for (const auto place : selected_) sizes.push_back(axis(place).size);
  return sizes;
}

bool Mesh::has(std::string_view name) const {
  return std::any_of(selected_.begin(), selected_.end(),
                     [&](size_t place) { return axis(place).name == name; });
}

size_t Mesh::find(std::string_view name) const {
  for (const auto place : selected_) {
    if (axis(place).name == name) return place;
  }
  throw ConfigError(format("[mesh] axis '{}' is unknown, must be one of {}", name,
                           selected_.empty() ? "none (the mesh has no axes)" : join(axis_names())));
}

int Mesh::size() const {
  int product = 1;
  for (const auto place : selected_) product *= axis(place).size;
  return product;
}

int Mesh::size(std::string_view name) const { return axis(find(name)).size; }

int Mesh::rank() const { return grid_->index_over(selected_); }

std::vector<int> Mesh::coordinate() const {
  std::vector<int> mine;
  for (const auto place : selected_) mine.push_back(grid_->coordinate[place]);
  return mine;
}

int Mesh::coordinate(std::string_view name) const { return grid_->coordinate[find(name)]; }

std::optional<std::vector<int>> Mesh::coordinate_of(int rank) const {
  if (rank < 0 || rank >= size()) return std::nullopt;
  std::vector<int> at(selected_.size());
  for (size_t i = selected_.size(); i-- > 0;) {
    at[i] = rank % axis(selected_[i]).size;
    rank /= axis(selected_[i]).size;
  }
  return at;
}

std::optional<int> Mesh::rank_at(std::span<const int> at) const {
  if (at.size() != selected_.size()) {
    throw ConfigError(
        format("[mesh] coordinate ({}) has {} entries, must have one for each axis of {}", join(at),
               at.size(), describe()));
  }
  int rank = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    const int size = axis(selected_[i]).size;
    if (at[i] < 0 || at[i] >= size) return std::nullopt;
    rank = rank * size + at[i];
  }
  return rank;
}

std::optional<int> Mesh::rank_at(std::initializer_list<int> at) const {
  return rank_at(std::span<const int>(at.begin(), at.size()));
}

std::vector<int> Mesh::members() const {
  const auto world = grid_->group.members();
  std::vector<int> ranks;
  auto at = grid_->coordinate;
  for (int rank = 0; rank < size(); ++rank) {
    const auto here = *coordinate_of(rank);
    for (size_t i = 0; i < selected_.size(); ++i) at[selected_[i]] = here[i];
    int index = 0;
    for (size_t place = 0; place < at.size(); ++place) {
      index = index * axis(place).size + at[place];
    }
    ranks.push_back(world[index]);
  }
  return ranks;
}

Mesh Mesh::operator[](std::string_view name) const { return Mesh(grid_, {find(name)}); }

Mesh Mesh::slice(std::span<const std::string> names) const {
  if (names.empty()) throw ConfigError("[mesh] a slice must have at least one axis");
  std::vector<size_t> selected;
  for (const auto& name : names) {
    selected.push_back(find(name));
    if (std::count(selected.begin(), selected.end(), selected.back()) > 1) {
      throw ConfigError(format("[mesh] slice ({}): axis {} is named twice", join(names), name));
    }
  }
  return Mesh(grid_, std::move(selected));
}

Mesh Mesh::slice(std::initializer_list<std::string> names) const {
  return slice(std::span<const std::string>(names.begin(), names.size()));
}

comm::Group Mesh::flatten() const {
  if (!grid_->groups.contains(selected_)) grid_->make_group(selected_);
  return grid_->groups.at(selected_);
}

comm::Group Mesh::group() const {
  const auto found = grid_->groups.find(selected_);
  if (found == grid_->groups.end()) {
    throw ConfigError(
        format("[mesh] axes {} have no common group yet: every rank must call "
               "flatten on them first",
               join(axis_names())));
  }
  return found->second;
}

std::string Mesh::describe() const { return describe_axes(axes()); }

}  // namespace lockstep::mesh
