"""`kvpool` whose servers have fault points, armed by KVPOOL_FAULTS: `python -m support.faulty_server serve ...`."""

import os
from functools import partial
from unittest import mock

from kvpool.cli import main
from kvpool.server import app
from support.faults import VARIABLE, ArmedFaults

if __name__ == "__main__":
    armed = ArmedFaults(os.environ.get(VARIABLE, ""))
    with mock.patch.object(app, "serve", partial(app.serve, faults=armed)):
        main()
