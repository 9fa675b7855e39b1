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

// Files are opened when first needed. Not for several threads at a time. What is wrong with the
// checkpoint is a CheckpointError with the file's name; a disk that fails is a SystemError.
class CheckpointReader {
 public:
  // With `verify`, bytes are compared with the manifest's checksums before they are given out.
  explicit CheckpointReader(std::string path, bool verify = true);
  ~CheckpointReader();

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }

  // Fills `out` with the elements of `box`, row-major, as the checkpoint stores them. Reads only
  // what of the files holds them. ConfigError where the tensor is unknown, the box is not inside
  // it, or `out` has another size.
  void read(const std::string& tensor, const layout::Box& box, std::span<std::byte> out);

  // From the files' data, so far.
  uint64_t bytes_read() const { return bytes_read_; }

 private:
  class File;
  File& open(const std::string& name);

  std::string path_;
  Manifest manifest_;
  bool verify_;
  std::map<std::string, std::unique_ptr<File>> files_;
  uint64_t bytes_read_ = 0;
};

}  // namespace lockstep::formats
