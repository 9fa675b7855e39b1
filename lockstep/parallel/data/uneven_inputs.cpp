// SPDX-License-Identifier: Apache-2.0
#include "lockstep/parallel/data/uneven_inputs.h"

#include <ATen/ATen.h>

#include "lockstep/comm/collectives.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::parallel::detail {
namespace {

const char* place_of(Activity activity) {
  switch (activity) {
    case Activity::buffers:
      return "forward";
    case Activity::gradients:
      return "backward";
    default:
      return "set_bucket_size or to";
  }
}

}  // namespace

Attendance announce(Activity activity, const comm::Group& group) {
  // One place for each rank: what it does.
  const at::Tensor board = at::zeros({group.size()}, at::kInt);
  int* const doing = board.data_ptr<int>();
  doing[group.rank()] = static_cast<int>(activity);
  comm::all_reduce(board, group, {.tag = "who takes part"}).wait();

  Attendance attendance{.activity = Activity::none, .active = 0, .leader = 0};
  for (int rank = group.size() - 1; rank >= 0; --rank) {
    const auto theirs = static_cast<Activity>(doing[rank]);
    if (theirs == Activity::none) continue;
    if (attendance.active > 0 && theirs != attendance.activity) {
      throw MismatchError(
          format("[ddp] rank {} is in {}, rank {} in {}; ranks with data must take the same steps",
                 rank, place_of(theirs), attendance.leader, place_of(attendance.activity)));
    }
    attendance = {.activity = theirs, .active = attendance.active + 1, .leader = rank};
  }
  return attendance;
}

}  // namespace lockstep::parallel::detail
