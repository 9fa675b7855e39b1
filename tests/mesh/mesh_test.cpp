// SPDX-License-Identifier: Apache-2.0
#include "lockstep/mesh/mesh.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/comm/collectives.h"
#include "tests/mesh/rank_checks.h"

namespace lockstep::mesh {
namespace {

using comm::Group;
using comm::run_threads;
using Ints = std::vector<int>;
using Names = std::vector<std::string>;

// Everyone's number, in the order of the group's ranks, found out by communicating.
Ints gathered(int mine, const Group& group) {
  const auto all = at::empty({group.size()}, at::kInt);
  comm::all_gather(all, at::full({1}, mine, at::kInt), group).wait();
  return {all.data_ptr<int>(), all.data_ptr<int>() + all.numel()};
}

TEST(Mesh, OneRankNeedsNoLauncher) {
  const Mesh none;
  EXPECT_EQ(none.size(), 1);
  EXPECT_EQ(none.rank(), 0);
  EXPECT_TRUE(none.axes().empty());
  EXPECT_EQ(none.describe(), "no axes");

  const Mesh mesh(Group(), {{"dp", 1}, {"tp", 1}});
  EXPECT_EQ(mesh["tp"].group().size(), 1);
  EXPECT_EQ(mesh.flatten({"tp", "dp"}).size(), 1);
  EXPECT_EQ(mesh.coordinate(), Ints({0, 0}));
  const auto value = at::ones({3});
  comm::all_reduce(value, mesh["dp"]).wait();
  EXPECT_TRUE(at::equal(value, at::ones({3})));
}

TEST(Mesh, RowMajorCoordinates) {
  run_threads(6, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 3}});
    const int r = group.rank();
    require_equal(mesh.axis_names(), Names{"dp", "tp"});
    require_equal(mesh.shape(), Ints{2, 3});
    require_equal(mesh.describe(), "dp 2 x tp 3");
    require_equal(mesh.rank(), r);
    require_equal(mesh.coordinate(), Ints{r / 3, r % 3});
    require_equal(mesh.coordinate("dp"), r / 3);
    require_equal(mesh.coordinate("tp"), r % 3);
    require_equal(mesh.size("tp"), 3);
    require_equal(mesh.size(), 6);
    require_equal(mesh.has("tp") && !mesh.has("pp"), true);
    for (int other = 0; other < 6; ++other) {
      require_equal(mesh.coordinate_of(other).value(), Ints{other / 3, other % 3});
      require_equal(mesh.rank_at({other / 3, other % 3}).value(), other);
    }
  });
}

TEST(Mesh, OutsideIsNone) {
  run_threads(6, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 3}});
    require_equal(mesh.coordinate_of(6).has_value() || mesh.coordinate_of(-1).has_value(), false);
    require_equal(mesh.rank_at({2, 0}).has_value(), false);
    require_equal(mesh.rank_at({0, 3}).has_value(), false);
    require_equal(mesh.rank_at({0, -1}).has_value(), false);
    require_refused([&] { mesh.rank_at({0}); }, "coordinate (0) has 1 entries");
  });
}

TEST(Mesh, AxisGroupsAreTheRightRanksInOrder) {
  run_threads(8, [](Group group) {
    const Mesh mesh(group, {{"a", 2}, {"b", 2}, {"c", 2}});
    const int r = group.rank();
    const int bit[] = {4, 2, 1};
    const char* names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; ++i) {
      const Ints expected = {r & ~bit[i], r | bit[i]};
      require_equal(gathered(r, mesh[names[i]]), expected);
      require_equal(mesh[names[i]].members(), expected);
      require_equal(mesh[names[i]].rank() != 0, (r & bit[i]) != 0);
      require_equal(mesh[names[i]].group().rank(), mesh[names[i]].rank());
    }
  });
}

// Every factorisation of each world size, in some orders.
TEST(Mesh, AgreesWithTheRankMap) {
  for (const int world : {1, 2, 3, 4, 6, 8}) {
    run_threads(world, [world](Group group) {
      for (int dp = 1; dp <= world; ++dp) {
        for (int tp = 1; world % dp == 0 && tp <= world / dp; ++tp) {
          if (world / dp % tp != 0) continue;
          for (const auto order :
               {layout::Order::pp_fastest, layout::Order::tp_fastest, layout::Order::tp_pp_dp}) {
            const layout::RankMap map({dp, tp, world / dp / tp}, order);
            const auto mesh = Mesh::parallel(group, map.dims(), order);
            require_equal(mesh.rank(), group.rank());
            for (const auto axis : {layout::Axis::dp, layout::Axis::tp, layout::Axis::pp}) {
              const auto slice = mesh[name_of(axis)];
              require_equal(slice.coordinate()[0], map.coordinate_of(group.rank()).at(axis));
              require_equal(slice.members(), map.group(axis, group.rank()));
              const std::string name = slice.group().name();
              require_equal(name.substr(name.rfind('/') + 1), map.group_id(axis, group.rank()));
              require_equal(gathered(group.rank(), slice), map.group(axis, group.rank()));
            }
          }
        }
      }
    });
  }
}

// Errors name the group by its id; two meshes of one world do not share it.
TEST(Mesh, GroupsAreNamedByTheirIds) {
  run_threads(4, [](Group group) {
    const auto first = Mesh::parallel(group, {.dp = 2, .tp = 1, .pp = 2});
    const auto second = Mesh::parallel(group, {.dp = 2, .tp = 1, .pp = 2});
    const std::string id = group.rank() % 2 == 0 ? "dp_group_tp0_pp0" : "dp_group_tp0_pp1";
    require_equal(first["dp"].group().name().ends_with("/" + id), true);
    require_equal(first["dp"].group().name() != second["dp"].group().name(), true);
    require_equal(first.flatten({"dp", "tp"})
                      .name()
                      .ends_with(group.rank() % 2 == 0 ? "/dp-tp_group_pp0" : "/dp-tp_group_pp1"),
                  true);
    std::string message;
    try {
      comm::all_reduce(at::ones({first.coordinate("dp") + 1}), first["dp"]).wait();
    } catch (const std::exception& error) {
      message = error.what();
    }
    require_equal(message.find(id) != std::string::npos, true);
  });
}

TEST(Mesh, EachColourHasALabelOfItsOwn) {
  const auto refused = [](const std::function<std::string(int)>& label) {
    try {
      run_threads(
          2, [&](Group group) { (void)group.split_named(group.rank(), 0, label(group.rank())); });
    } catch (const ConfigError&) {
      return true;
    }
    return false;
  };
  EXPECT_TRUE(refused([](int) { return "same"; }));
  EXPECT_TRUE(refused([](int rank) { return rank == 0 ? "with/slash" : "b"; }));
  EXPECT_FALSE(refused([](int rank) { return rank == 0 ? "a" : "b"; }));
}

TEST(Mesh, Shapes) {
  run_threads(6, [](Group group) {
    require_equal(Mesh::linear(group).axes(), std::vector<Axis>{{"pp", 6}});
    require_equal(Mesh::square(group).axes(), std::vector<Axis>{{"row", 3}, {"col", 2}});
    require_equal(Mesh::cube(group).axes(), std::vector<Axis>{{"dp", 3}, {"tp", 2}, {"pp", 1}});
    require_equal(Mesh::linear(group, "dp").axis_names(), Names{"dp"});
  });
  run_threads(5, [](Group group) { require_equal(Mesh::square(group).shape(), Ints{5, 1}); });
  run_threads(8, [](Group group) { require_equal(Mesh::cube(group).shape(), Ints{2, 2, 2}); });
}

TEST(Mesh, SlicesAreMeshes) {
  run_threads(8, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 2}, {"pp", 2}});
    const auto both = mesh.slice({"pp", "dp"});
    const int d = mesh.coordinate("dp"), p = mesh.coordinate("pp"), t = mesh.coordinate("tp");
    require_equal(both.shape(), Ints{2, 2});
    require_equal(both.axis_names(), Names{"pp", "dp"});
    require_equal(both.rank(), p * 2 + d);
    require_equal(both.coordinate(), Ints{p, d});
    const int base = 2 * t;  // ranks are dp * 4 + tp * 2 + pp
    require_equal(both.members(), Ints{base, base + 4, base + 1, base + 5});
    require_equal(both["dp"].members(), mesh["dp"].members());
    require_refused([&] { both["tp"]; }, "axis 'tp' ... pp, dp");
  });
}

TEST(Mesh, FlattenedAxes) {
  run_threads(8, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 2}, {"pp", 2}});
    const auto slice = mesh.slice({"dp", "tp"});
    require_refused([&] { slice.group(); }, "axes dp, tp ... no common group ... flatten");
    const auto flat = mesh.flatten({"dp", "tp"});
    require_equal(gathered(group.rank(), flat), slice.members());
    require_equal(flat.rank(), slice.rank());
    // The order of the axes is the order of the ranks.
    const auto turned = mesh.slice({"tp", "dp"});
    require_equal(gathered(group.rank(), turned.flatten()), turned.members());
    require_equal(turned.members() == slice.members(), false);
    // Slices made before and after share it, and it is made once.
    require_equal(slice.group().name(), flat.name());
    require_equal(mesh.flatten({"dp", "tp"}).name(), flat.name());
    require_equal(gathered(group.rank(), mesh.slice({"dp", "tp"})), slice.members());
    // Asking again is no longer collective.
    if (group.rank() == 0) require_equal(mesh.flatten({"dp", "tp"}).size(), 4);
    comm::barrier(group).wait();
  });
}

TEST(Mesh, FlattenedAxesInEveryOrder) {
  run_threads(6, [](Group group) {
    const Mesh mesh(group, {{"a", 3}, {"b", 1}, {"c", 2}});
    Names names = {"a", "b", "c"};
    do {
      for (size_t count = 1; count <= 3; ++count) {
        const auto slice = mesh.slice(std::span<const std::string>(names.data(), count));
        require_equal(gathered(group.rank(), slice.flatten()), slice.members());
      }
    } while (std::next_permutation(names.begin(), names.end()));
    require_equal(mesh.flatten().name(), group.name());
    require_equal(mesh.group().name(), group.name());
  });
}

// Slicing never communicates: ranks may ask for different slices, in any order, or for none.
TEST(Mesh, SlicingIsNotCollective) {
  run_threads(4, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 2}});
    if (group.rank() == 0) {
      require_equal(mesh["dp"].size(), 2);
    } else if (group.rank() == 1) {
      require_equal(mesh["tp"].size() + mesh["dp"].size(), 4);
      require_equal(mesh.slice({"tp", "dp"}).size(), 4);
    } else if (group.rank() == 2) {
      require_equal(mesh["tp"].size(), 2);
    }
    comm::barrier(group).wait();
  });
}

// An axis that spans the whole mesh has a group of its own: work on it needs no order with work on
// the mesh's.
TEST(Mesh, AxisGroupsAreIndependentOfTheWhole) {
  run_threads(2, [](Group group) {
    const auto mesh = Mesh::linear(group, "dp");
    require_equal(mesh["dp"].group().name() == group.name(), false);
    const auto a = at::ones({4}), b = at::ones({4});
    const auto on_axis = [&] { return comm::all_reduce(a, mesh["dp"]); };
    const auto on_group = [&] { return comm::all_reduce(b, group); };
    auto first = group.rank() == 0 ? on_axis() : on_group();
    auto second = group.rank() == 0 ? on_group() : on_axis();
    first.wait();
    second.wait();
    require_same(a, at::full({4}, 2.0));
    require_same(b, at::full({4}, 2.0));
  });
}

TEST(Mesh, SplitGroupsKeepWorldRanks) {
  run_threads(4, [](Group world) {
    // The odd ranks' mesh is on a group whose ranks are not the world's.
    const auto half = world.split(world.rank() % 2, world.rank());
    const Mesh mesh(half, {{"dp", 2}, {"tp", 1}});
    require_equal(mesh["dp"].members(), Ints{world.rank() % 2, world.rank() % 2 + 2});
    require_equal(mesh["tp"].members(), Ints{world.rank()});
  });
}

TEST(Mesh, WrongShapesAreRefused) {
  run_threads(4, [](Group group) {
    const auto refused = [&](std::vector<Axis> axes, const char* part) {
      require_refused([&] { Mesh(group, axes); }, part);
    };
    refused({{"dp", 2}, {"tp", 3}}, "[mesh] ... dp 2 x tp 3 = 6 ... group size 4");
    refused({{"dp", 2}, {"dp", 2}}, "axis dp ... twice");
    refused({{"", 4}}, "axis ... no name");
    refused({{"a", -2}, {"b", -2}}, "axis a ... -2 ... at least 1");
    refused({}, "no axes = 1 ... group size 4");
    require_refused(
        [&] {
          Mesh::parallel(group, {2, 2, 3});
        },
        "[parallel_dims] ... dp 2 x tp 2 x pp 3 = 12 ... world size 4");
  });
}

TEST(Mesh, UnknownAxesAreRefused) {
  run_threads(4, [](Group group) {
    const Mesh mesh(group, {{"dp", 2}, {"tp", 2}});
    require_refused([&] { mesh["pp"]; }, "axis 'pp' ... dp, tp");
    require_refused([&] { mesh.size("pp"); }, "axis 'pp' ... dp, tp");
    require_refused([&] { mesh.coordinate("pp"); }, "axis 'pp' ... dp, tp");
    require_refused([&] { mesh.slice({"dp", "dp"}); }, "axis dp ... twice");
    require_refused([&] { mesh.slice(std::span<const std::string>()); }, "a slice ... one axis");
  });
}

}  // namespace
}  // namespace lockstep::mesh
