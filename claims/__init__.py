"""The field notes' claims on trial: each judged by a rule over what was measured, so that no verdict can go stale."""

import tilelab  # noqa: F401, it says that Ctrl-C cancelled a command, also during the imports below
