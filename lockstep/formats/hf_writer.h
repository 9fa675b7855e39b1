// SPDX-License-Identifier: Apache-2.0
// Writes a model's tensors as the Hugging Face libraries keep them, for HfDirectory and for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/formats/safetensors_writer.h"

namespace lockstep::formats {

using ByteSink = std::function<void(std::span<const std::byte>)>;
// Gives the sink all bytes of a tensor, row-major, in pieces of any size.
using ByteSource = std::function<void(const std::string& tensor, const ByteSink& sink)>;

struct HfFiles {
  int64_t files = 0, bytes = 0;  // bytes of tensors

  bool operator==(const HfFiles&) const = default;
};

// Writes model.safetensors into the folder; or, where that would be larger than `max_file_bytes`,
// files model-00001-of-00003.safetensors and their index. Tensors are put into files in the order
// given; one that is larger has a file of its own.
HfFiles write_hf_model(const std::string& folder, const std::vector<SafetensorsTensor>& tensors,
                       const ByteSource& source, int64_t max_file_bytes);

}  // namespace lockstep::formats
