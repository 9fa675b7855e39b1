// SPDX-License-Identifier: Apache-2.0
// The newest checkpoint that is sound. Loading compares what it reads with its checksums, so a
// checkpoint is read a second time only where loading has failed: to tell damage, for which an
// older one is tried, from a checkpoint of another model, for which none would do.
#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/exchange.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/formats/checkpoint_folder.h"

namespace lockstep::checkpoint {
namespace {

struct Found {
  std::string path;  // empty: there is none
  int64_t step = 0;
  size_t complete = 0;  // checkpoints in the folder, damaged or not
};

// One rank looks: a network disk may show others something older.
Found look(const std::string& dir, int64_t before, const comm::Group& group) {
  const auto texts = detail::run_on_all_ranks("resume", group, [&]() -> std::string {
    if (group.rank() != 0) return "";
    const auto newest = formats::newest_complete(dir, before);
    return format("{} {} {}", formats::list_complete(dir).size(), newest ? newest->step : 0,
                  newest ? newest->path : "");
  });
  const std::string& text = texts[0];
  const size_t first = text.find(' '), second = text.find(' ', first + 1);
  return {text.substr(second + 1), std::stoll(text.substr(first + 1)), std::stoul(text)};
}

}  // namespace

std::string damage_in(const std::string& path, const comm::Group& group) {
  std::string mine;
  try {
    formats::verify(path, {.share = group.rank(), .shares = group.size()});
  } catch (const Error& failure) {
    mine = failure.what();
  }
  for (const std::string& damage : detail::exchange_texts(mine, group)) {
    if (!damage.empty()) return damage;
  }
  return "";
}

std::optional<Loaded> load_newest(const std::string& dir, const std::vector<NamedSlice>& slices,
                                  const comm::Group& group, const LoadOptions& options) {
  std::string first_damage;
  const auto skip = [&](const std::string& path, const std::string& damage) {
    if (group.rank() == 0) log::warn(format("checkpoint {} is skipped: {}", path, damage));
    if (first_damage.empty()) first_damage = damage;
  };
  int64_t before = std::numeric_limits<int64_t>::max();
  while (true) {
    const Found found = look(dir, before, group);
    if (found.path.empty() && found.complete == 0) return std::nullopt;
    if (found.path.empty()) {
      throw ConfigError(
          format("none of the {} checkpoints in {} is sound{}{}; choose another folder "
                 "(checkpoint.dir), or remove them to begin at step 0",
                 found.complete, dir, first_damage.empty() ? "" : ", the newest: ", first_damage));
    }
    before = found.step;
    // What a damaged one has written stays where an older one does not have it.
    if (options.partial) {
      if (const std::string damage = damage_in(found.path, group); !damage.empty()) {
        skip(found.path, damage);
        continue;
      }
    }
    try {
      return load(found.path, slices, group, options);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {
      const std::string damage = damage_in(found.path, group);
      if (damage.empty()) throw;
      skip(found.path, damage);
    }
  }
}

}  // namespace lockstep::checkpoint
