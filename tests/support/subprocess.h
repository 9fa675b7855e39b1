#include "tests/launch/subprocess.h"
