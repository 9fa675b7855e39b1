// SPDX-License-Identifier: Apache-2.0
// Scalars as TensorBoard reads them: an event file, records of protocol buffers with checksums.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "lockstep/core/fd.h"

namespace lockstep::io {

class TensorboardFile {
 public:
  TensorboardFile() = default;  // writes nothing
  // A new file in the folder, which is made. TensorBoard shows the files of one folder as one run,
  // in the order of their names. SystemError where it cannot be written.
  explicit TensorboardFile(const std::string& folder);

  using Scalar = std::pair<std::string_view, double>;
  // One event with these values; what is not finite is left out. `time` in seconds since 1970.
  void write(int64_t step, double time, std::span<const Scalar> scalars);

 private:
  void record(std::string_view event);
  Fd fd_;
};

}  // namespace lockstep::io
