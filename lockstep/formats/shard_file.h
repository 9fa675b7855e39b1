// SPDX-License-Identifier: Apache-2.0
// One file of a checkpoint: the slices that one rank saves, in the form that PyTorch's Distributed
// Checkpoint reads too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/formats/manifest.h"
#include "lockstep/formats/safetensors_writer.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

// "shard-00003-model-00001-of-00001.safetensors". Both counts begin at 1.
std::string shard_file_name(int shard, int part = 1, int parts = 1);

// A slice to be written; its bytes are those of a tensor of shape slice_shape(shape, box).
struct ShardSlice {
  std::string name;  // of the whole tensor
  std::string dtype;
  layout::Shape shape;  // of the whole tensor
  layout::Box box;
};

// A file has a tensor's name once, so a rank that holds several slices of a tensor (as of a fused
// matrix) writes several files: the n-th slice of each tensor goes to the n-th. Indices of slices,
// by file.
std::vector<std::vector<size_t>> shard_parts(const std::vector<ShardSlice>& slices);

// A writer for FOLDER/FILE, whose metadata says where each slice lies in its tensor.
SafetensorsWriter open_shard(const std::string& folder, const std::string& file,
                             const std::vector<ShardSlice>& slices);

// The file as part of a manifest, to be merged into it.
Manifest shard_manifest(int64_t step, const std::string& file, const io::FileRecord& record,
                        const std::vector<ShardSlice>& slices);

}  // namespace lockstep::formats
