// SPDX-License-Identifier: Apache-2.0
// Ranks on a grid with named axes.
#pragma once

#include <array>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/comm/group.h"
#include "lockstep/layout/rank_map.h"

namespace lockstep::mesh {

struct Axis {
  std::string name;
  int size = 1;

  bool operator==(const Axis&) const = default;
};

// A value: copies and slices share the grid and its groups. Ranks are laid out row-major: the last
// axis is fastest. A slice is a mesh of some of the axes, through this rank: mesh["dp"] holds the
// ranks that differ from it on "dp" only. Wherever a group is asked for a mesh can be passed. Not
// thread safe while flatten() runs.
class Mesh {
 public:
  // One rank, no axes.
  Mesh();
  // Collective: makes the group of every axis. The sizes' product must be the group's size.
  Mesh(comm::Group group, std::vector<Axis> axes);

  // All ranks in a row.
  static Mesh linear(comm::Group group, std::string axis = "pp");
  // The most nearly square or cubic grid without holes, longest axis first: 6 ranks are 3 x 2.
  static Mesh square(comm::Group group, std::array<std::string, 2> axes = {"row", "col"});
  static Mesh cube(comm::Group group, std::array<std::string, 3> axes = {"dp", "tp", "pp"});
  // Axes "dp", "tp" and "pp", slowest first as layout::RankMap orders them.
  static Mesh parallel(comm::Group group, const layout::ParallelDims& dims,
                       layout::Order order = layout::Order::pp_fastest);

  std::vector<Axis> axes() const;
  std::vector<std::string> axis_names() const;
  std::vector<int> shape() const;
  bool has(std::string_view axis) const;
  int size() const;
  int size(std::string_view axis) const;

  // This rank's number in the mesh, row-major, and its place on the axes.
  int rank() const;
  std::vector<int> coordinate() const;
  int coordinate(std::string_view axis) const;
  // None for a rank or a coordinate outside the mesh.
  std::optional<std::vector<int>> coordinate_of(int rank) const;
  std::optional<int> rank_at(std::span<const int> coordinate) const;
  std::optional<int> rank_at(std::initializer_list<int> coordinate) const;
  // World rank of each rank of the mesh.
  std::vector<int> members() const;

  // Not collective. An unknown axis is a ConfigError.
  Mesh operator[](std::string_view axis) const;
  Mesh slice(std::span<const std::string> axes) const;
  Mesh slice(std::initializer_list<std::string> axes) const;
#ifdef __cpp_multidimensional_subscript
  template <class... Names>
  Mesh operator[](std::string_view first, std::string_view second, Names... more) const {
    return slice({std::string(first), std::string(second), std::string(more)...});
  }
#endif

  // The ranks of all axes of this mesh, or of those named, as one group: row-major in the order
  // given. The first call for a list of axes is collective over the whole mesh that this one is a
  // slice of; later ones return the same group.
  comm::Group flatten() const;
  comm::Group flatten(std::initializer_list<std::string> axes) const {
    return slice(axes).flatten();
  }

  // The group of one axis, or the one that a mesh of several was made on. A slice of several axes
  // has one once it was flattened.
  comm::Group group() const;
  operator comm::Group() const { return group(); }  // NOLINT(google-explicit-constructor)

  std::string describe() const;  // "dp 2 x tp 4"

 private:
  struct Grid;
  Mesh(std::shared_ptr<Grid> grid, std::vector<size_t> selected);
  size_t find(std::string_view axis) const;
  const Axis& axis(size_t place) const;

  std::shared_ptr<Grid> grid_;
  std::vector<size_t> selected_;  // this mesh's axes, as places in the grid's
};

}  // namespace lockstep::mesh
