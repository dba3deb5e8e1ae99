#include "ebb/optim/cast.h"
