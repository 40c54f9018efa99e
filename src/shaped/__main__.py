"""`python -m shaped` is the command `shaped`."""

from shaped.commands.app import main

main()
