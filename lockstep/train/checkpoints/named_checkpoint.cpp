// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/checkpoints/named_checkpoint.h"

#include "lockstep/comm/control/rank_texts.h"
#include "lockstep/config/input_files.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::train {

checkpoint::Loaded load_named(const std::string& name,
                              const std::vector<checkpoint::NamedSlice>& slices,
                              const comm::Group& world, const checkpoint::LoadOptions& options) {
  // One rank looks: a network disk may show others something older.
  const std::string path = comm::run_on_all_ranks("resume", world, [&]() -> std::string {
    return world.rank() == 0 ? config::checkpoint_at(name) : "";
  })[0];
  try {
    return checkpoint::load(path, slices, world, options);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception&) {
    const std::string damage = checkpoint::damage_in(path, world);
    if (damage.empty()) throw;
    const auto others = comm::run_on_all_ranks("resume", world, [&]() -> std::string {
      return world.rank() == 0 ? config::other_checkpoints(path) : "";
    });
    throw ConfigError(format("{}; {}", damage, others[0]));
  }
}

}  // namespace lockstep::train
