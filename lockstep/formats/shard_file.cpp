// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/shard_file.h"

#include <map>
#include <string_view>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/io/json.h"

namespace lockstep::formats {

std::string shard_file_name(int shard, int part, int parts) {
  if (shard < 1 || part < 1 || part > parts) {
    throw ConfigError(
        format("[shard_file_name] shard {}, part {} of {}: counts begin at 1", shard, part, parts));
  }
  return format("shard-{:05}-model-{:05}-of-{:05}.safetensors", shard, part, parts);
}

std::vector<std::vector<size_t>> shard_parts(const std::vector<ShardSlice>& slices) {
  std::vector<std::vector<size_t>> parts;
  std::map<std::string_view, size_t> seen;  // slices of a tensor so far
  for (size_t i = 0; i < slices.size(); ++i) {
    const size_t nth = seen[slices[i].name]++;
    if (nth == parts.size()) parts.emplace_back();
    parts[nth].push_back(i);
  }
  return parts;
}

SafetensorsWriter open_shard(const std::string& folder, const std::string& file,
                             const std::vector<ShardSlice>& slices) {
  auto sharding = io::Json::object();
  std::vector<SafetensorsTensor> tensors;
  for (const auto& slice : slices) {
    if (slice.box.ranges.size() != layout::Box::whole(slice.shape).ranges.size()) {
      throw ConfigError(format("[open_shard] tensor {} {}: slice {} has other dimensions",
                               slice.name, layout::describe(slice.shape), slice.box.describe()));
    }
    sharding[slice.name] = {{"saved_offsets", slice_offsets(slice.shape, slice.box)}};
    tensors.push_back({slice.name, slice.dtype, slice_shape(slice.shape, slice.box)});
  }
  std::map<std::string, std::string> metadata = {{"DCP_VERSION", "1.0"}, {"format", "pt"}};
  try {
    metadata["DCP_SHARDING_INFO"] = sharding.dump();
  } catch (const io::Json::exception& failure) {
    throw ConfigError(format("[open_shard] names must be UTF-8: {}", io::reason_of(failure)));
  }
  return SafetensorsWriter(folder + "/" + file, std::move(tensors), metadata);
}

Manifest shard_manifest(int64_t step, const std::string& file, const io::FileRecord& record,
                        const std::vector<ShardSlice>& slices) {
  Manifest manifest{.step = step};
  manifest.files.emplace(file, record);
  for (const auto& slice : slices) {
    Manifest part{.step = step};
    part.tensors[slice.name] = {slice.dtype, slice.shape, {{file, slice.box}}};
    manifest.merge(part);
  }
  return manifest;
}

}  // namespace lockstep::formats
