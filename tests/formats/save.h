// Small checkpoints for tests.
#pragma once

#include <numeric>
#include <string>
#include <vector>

#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/shard_file.h"

namespace lockstep::formats::test_support {

inline FileRecord write_shard(const std::string& folder, const std::string& file,
                              const std::vector<ShardSlice>& slices, int seed) {
  auto writer = open_shard(folder, file, slices);
  for (const auto& entry : writer.entries()) {
    const std::vector<std::byte> bytes(entry.size(), static_cast<std::byte>(seed));
    writer.write(entry.name, bytes);
  }
  return writer.finish();
}

// Two shards of one tensor, whose bytes are `seed`.
inline std::string save(const std::string& dir, int64_t step, int seed = 0) {
  const auto folder = begin_checkpoint(dir, step);
  Manifest manifest{.step = step};
  for (int shard = 1; shard <= 2; ++shard) {
    const auto file = shard_file_name(shard);
    const std::vector<ShardSlice> slices = {
        {"w", "F32", {8, 4}, {{{4 * shard - 4, 4 * shard}, {0, 4}}}}};
    manifest.merge(shard_manifest(step, file, write_shard(folder, file, slices, seed), slices));
  }
  manifest.state["seed"] = std::to_string(seed);
  return commit_checkpoint(dir, manifest);
}

}  // namespace lockstep::formats::test_support
