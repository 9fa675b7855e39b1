// SPDX-License-Identifier: Apache-2.0
// Which files a data path means.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep::data {

struct DataFiles {
  std::vector<std::string> paths;  // each file once, in the order in which they are read
  int64_t unreadable = 0;          // files and folders that were skipped
  int64_t binary = 0;              // files with a zero byte in their first 8 KiB, skipped
};

// `path` is a file, a folder with all below it, a pattern for glob(3), or several of these
// separated by commas. Of a folder or pattern, hidden and empty files and binary ones that are not
// token files are left out, and the order is that of a hash of the relative path: any stretch of it
// is a fair sample of the whole. A file that is named itself must be usable, and no .json file with
// a list of objects. ConfigError where none is left.
DataFiles find_data_files(const std::string& path);

// Whether a file holds token ids: its name ends in .bin.
bool is_token_file(const std::string& path);

}  // namespace lockstep::data
