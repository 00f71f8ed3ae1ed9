"""The field notes' claims on trial: each judged by a rule over what was measured, so that no verdict can go stale."""
