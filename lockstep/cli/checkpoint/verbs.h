// SPDX-License-Identifier: Apache-2.0
// What `lockstep checkpoint` can do; each takes the words after its name and returns the exit
// status.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep::cli {

int checkpoint_inspect(const std::vector<std::string>& arguments);
int checkpoint_verify(const std::vector<std::string>& arguments);
int checkpoint_diff(const std::vector<std::string>& arguments);
int checkpoint_export(const std::vector<std::string>& arguments);
int checkpoint_import(const std::vector<std::string>& arguments);

// ---- shared by them ----

// The checkpoint itself, or the last in a folder of them, also if it is damaged: for those who ask
// about damage. ConfigError where there is none.
std::string last_checkpoint(const std::string& name);

// Bytes of the files of a checkpoint, the manifest too.
int64_t bytes_on_disk(const std::string& path);

// "blocks.2.weight" before "blocks.10.weight".
bool natural_less(std::string_view a, std::string_view b);

}  // namespace lockstep::cli
