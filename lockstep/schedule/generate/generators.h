// SPDX-License-Identifier: Apache-2.0
// The orders of actions, one function per kind. Private: not installed. Each fills what `schedule`
// holds for every rank; its numbers have been checked.
#pragma once

#include "lockstep/schedule/schedule.h"

namespace lockstep::schedule::detail {

void round_robin(Schedule& schedule);
void sequential(Schedule& schedule);
void gpipe(Schedule& schedule);
void one_f_one_b(Schedule& schedule);
void zb_h1(Schedule& schedule);
void zb_h2(Schedule& schedule);

void interleaved(Schedule& schedule, int group);
void looped_bfs(Schedule& schedule);
void zb_1p(Schedule& schedule, int group);

void zb_v(Schedule& schedule);
void dualpipe_v(Schedule& schedule);

}  // namespace lockstep::schedule::detail
