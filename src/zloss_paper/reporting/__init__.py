"""The reporting recommendations of the paper as a checklist over results."""
