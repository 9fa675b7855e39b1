// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/safetensors.h"

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/safetensors_header.h"

namespace lockstep::formats {

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path), file_(path) {
  auto header = parse_safetensors(file_.bytes(), file_.size(), path);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
  data_ = file_.bytes().subspan(header.data_begin);
  for (size_t i = 0; i < entries_.size(); ++i) index_.emplace(entries_[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  const auto* const entry = find(name);
  if (entry == nullptr) throw CheckpointError(format("{}: has no tensor {}", path_, name));
  return *entry;
}

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return data_.subspan(entry.begin, entry.size());
}

}  // namespace lockstep::formats
