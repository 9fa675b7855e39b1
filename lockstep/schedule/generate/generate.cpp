// SPDX-License-Identifier: Apache-2.0
// Which numbers each kind allows.
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/schedule/generate/generators.h"
#include "lockstep/schedule/render/render.h"
#include "lockstep/schedule/schedule.h"
#include "lockstep/schedule/validate.h"

namespace lockstep::schedule {
namespace {

void require(bool holds, Kind kind, const std::string& rule) {
  lockstep::require(holds, format("[schedule] {}: {}", layout::name_of(kind), rule));
}

bool takes_group(Kind kind) { return kind == Kind::interleaved || kind == Kind::zb_1p; }

void check_chunks(Kind kind, int chunks) {
  switch (kind) {
    case Kind::interleaved:
      return require(chunks >= 2, kind,
                     format("chunks is {}, must be at least 2; with one, use 1f1b", chunks));
    case Kind::looped_bfs:
      return require(chunks >= 2, kind,
                     format("chunks is {}, must be at least 2; with one, use sequential", chunks));
    case Kind::zb_1p:
      return require(chunks >= 1, kind, format("chunks is {}, must be at least 1", chunks));
    case Kind::zb_v:
    case Kind::dualpipe_v:
      return require(chunks == 2, kind,
                     format("chunks is {}, must be 2: one down the ranks and one back up", chunks));
    default:
      return require(chunks == 1, kind,
                     format("chunks is {}, but {} has one chunk per rank: interleaved, looped-bfs, "
                            "zb-1p, zb-v and dualpipe-v have more",
                            chunks, layout::name_of(kind)));
  }
}

// A part of a group that is shorter than the ranks would leave every rank waiting for it.
void check_group(const Pipeline& pipeline, int group) {
  const int p = pipeline.ranks, m = pipeline.microbatches;
  require(group >= p, pipeline.kind,
          format("group is {}, must be at least the number of ranks, {}", group, p));
  require(group <= m, pipeline.kind,
          format("microbatches is {}, must be at least the group, {}", m, group));
  require(m % group == 0 || m % group >= p, pipeline.kind,
          format("microbatches {} in groups of {} leaves {}, must leave none or at least the "
                 "number of ranks, {}",
                 m, group, m % group, p));
}

Schedule from_file(const ScheduleOptions& options) {
  require(!options.file.empty(), Kind::file, "the file must be named");
  Schedule schedule = read_csv(options.file);
  const auto agree = [&](const char* name, int wanted, int found) {
    if (wanted != 0 && wanted != found) {
      throw ConfigError(
          format("{}: {} is {} in the file, but must be {}", options.file, name, found, wanted));
    }
  };
  agree("ranks", options.ranks, schedule.ranks);
  agree("microbatches", options.microbatches, schedule.microbatches);
  agree("chunks", options.chunks, schedule.chunks);
  return schedule;
}

int group_of(const ScheduleOptions& options) {
  return options.group == 0 ? options.ranks : options.group;
}

}  // namespace

void require_valid(const ScheduleOptions& options) {
  const Kind kind = options.kind;
  require(options.group == 0 || takes_group(kind), kind,
          format("group is {}, but only interleaved and zb-1p have groups", options.group));
  if (kind == Kind::file) return;
  require(options.file.empty(), kind,
          format("the file is {}, but only the kind file reads one", options.file));
  require(options.ranks >= 1, kind, format("ranks is {}, must be at least 1", options.ranks));
  require(options.microbatches >= 1, kind,
          format("microbatches is {}, must be at least 1", options.microbatches));
  check_chunks(kind, options.chunks);

  const Pipeline schedule{kind, options.ranks, options.microbatches, options.chunks,
                          StageOrder::loop};
  require(detail::places(schedule) <= detail::kMostPlaces, kind,
          format("{} ranks x {} micro-batches x {} chunks must be at most {}", options.ranks,
                 options.microbatches, options.chunks, detail::kMostPlaces));
  if (takes_group(kind) && options.chunks > 1) check_group(schedule, group_of(options));
  require(kind != Kind::dualpipe_v || options.microbatches >= 2 * options.ranks, kind,
          format("microbatches is {}, must be at least twice the number of ranks, {}",
                 options.microbatches, 2 * options.ranks));
}

Schedule generate(const ScheduleOptions& options) {
  require_valid(options);
  const Kind kind = options.kind;
  if (kind == Kind::file) return from_file(options);
  Schedule schedule{{kind, options.ranks, options.microbatches, options.chunks, StageOrder::loop}};
  schedule.actions.resize(options.ranks);
  const int group = group_of(options);
  switch (kind) {
    case Kind::round_robin:
      detail::round_robin(schedule);
      break;
    case Kind::sequential:
      detail::sequential(schedule);
      break;
    case Kind::gpipe:
      detail::gpipe(schedule);
      break;
    case Kind::one_f_one_b:
      detail::one_f_one_b(schedule);
      break;
    case Kind::interleaved:
      detail::interleaved(schedule, group);
      break;
    case Kind::looped_bfs:
      detail::looped_bfs(schedule);
      break;
    case Kind::zb_h1:
      detail::zb_h1(schedule);
      break;
    case Kind::zb_h2:
      detail::zb_h2(schedule);
      break;
    case Kind::zb_1p:
      detail::zb_1p(schedule, group);
      break;
    case Kind::zb_v:
      schedule.order = StageOrder::v;
      detail::zb_v(schedule);
      break;
    case Kind::dualpipe_v:
      schedule.order = StageOrder::v;
      detail::dualpipe_v(schedule);
      break;
    case Kind::file:
      break;
  }
  validate(schedule);
  return schedule;
}

}  // namespace lockstep::schedule
