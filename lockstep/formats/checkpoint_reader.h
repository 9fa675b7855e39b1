// SPDX-License-Identifier: Apache-2.0
// Reads a checkpoint by the tensors of the whole model, whatever layout it was saved from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "lockstep/formats/manifest.h"
#include "lockstep/layout/box.h"

namespace lockstep::formats {

// Keeps a block of 1 MiB and the headers of the files it used, of which one is open. Not for
// several threads at a time. What is wrong with the checkpoint is a CheckpointError with the file's
// name; a disk that fails is a SystemError.
class CheckpointReader {
 public:
  // With `verify`, headers and data are compared with the manifest's checksums before anything of
  // them is believed or given out.
  explicit CheckpointReader(std::string path, bool verify = true);
  ~CheckpointReader();

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }

  // Fills `out` with the elements of `box`, row-major, as the checkpoint stores them. Reads only
  // the blocks of the files that hold them. ConfigError where the tensor is unknown, the box is not
  // inside it, or `out` has another size.
  void read(const std::string& tensor, const layout::Box& box, std::span<std::byte> out);

  // From the files, so far.
  uint64_t bytes_read() const;

 private:
  struct Contents;
  const Contents& open(const std::string& name);
  // Where the slice's bytes begin in its file, which is open after this.
  uint64_t find(const std::string& tensor, const TensorRecord& record, const SliceRecord& slice);

  std::string path_;
  Manifest manifest_;
  bool verify_;
  std::unique_ptr<class CheckedFile> file_;
  std::map<std::string, Contents> contents_;  // by file
  uint64_t bytes_read_ = 0;                   // of the files that were open before
};

}  // namespace lockstep::formats
