// SPDX-License-Identifier: Apache-2.0
// What a checkpoint holds, by the names of the whole model's tensors. Nothing in it depends on
// ranks or on how they were arranged.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/io/file_record.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

// A part of a tensor, and the file it is in, where it has the tensor's name.
struct SliceRecord {
  std::string file;
  layout::Box box;  // in indices of the whole tensor

  bool operator==(const SliceRecord&) const = default;
};

struct TensorRecord {
  std::string dtype;  // "F32", as safetensors files name it
  layout::Shape shape;
  std::vector<SliceRecord> slices;

  bool operator==(const TensorRecord&) const = default;
};

// A value. `state` and `config` hold JSON texts, which keep their values, not their white space.
struct Manifest {
  int64_t step = 0;
  std::map<std::string, TensorRecord> tensors = {};
  std::map<std::string, io::FileRecord> files = {};
  std::map<std::string, std::string> state = {};  // of the run: samples, tokens, scaler, ...
  std::string config = "{}";

  // Throws CheckpointError, beginning with `origin`, unless each tensor's slices lie inside it, do
  // not overlap and cover it, each in another file of the list, and each file has as many
  // checksums as its size needs. The message says what is missing.
  void validate(const std::string& origin) const;

  // Adds the slices, files and state of a part of the same checkpoint, from another rank.
  // CheckpointError where the two contradict each other.
  void merge(const Manifest& part);

  // Ends with a checksum of the text. ConfigError where state or config is not JSON, or a name is
  // not UTF-8.
  std::string to_json() const;
  // Strict, and validated. CheckpointError begins with `origin`.
  static Manifest from_json(std::string_view text, const std::string& origin);
  // The same without validate(): what one rank tells another, before merge().
  static Manifest part_from_json(std::string_view text, const std::string& origin);

  bool operator==(const Manifest&) const = default;
};

// Shape and first indices of the tensor that holds a slice; both empty for a 0-d tensor.
layout::Shape slice_shape(const layout::Shape& whole, const layout::Box& box);
layout::Shape slice_offsets(const layout::Shape& whole, const layout::Box& box);

// A file name without folders, which does not begin with a dot.
bool is_plain_file_name(std::string_view name);

}  // namespace lockstep::formats
