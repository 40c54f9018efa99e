from shaped.commands.app import main

main()
